"""Speculative decoding: trees of drafted tokens, built, verified and packed."""
