"""Matrix products with weights."""
