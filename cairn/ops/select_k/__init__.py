"""Exact selection of the k largest numbers of a row, which ops of several families share."""
