"""Exact selection of the k largest elements of a row, which ops of several families share."""
