"""Attention over blocks and single columns of keys."""
