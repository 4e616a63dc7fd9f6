"""Writing to the paged cache."""
