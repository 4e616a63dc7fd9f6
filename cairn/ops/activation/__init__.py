"""Activations of feed-forward layers."""
