"""Quantization of values to 8 and 4 bits with scales."""
