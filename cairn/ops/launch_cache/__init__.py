"""Calls of ops whose launches are made again without the work in front of them."""
