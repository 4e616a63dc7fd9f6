"""Numbers in 8 and 4 bits with their scales."""
