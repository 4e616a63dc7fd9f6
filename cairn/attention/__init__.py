"""Attention backends: how the queries of a step read the paged cache."""
