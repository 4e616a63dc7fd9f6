"""Kernels of the landmark ops."""
