"""Schemes: storage of a linear map's matrix, plain or quantised, and the products with it."""
