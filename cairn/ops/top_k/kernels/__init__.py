"""Triton kernels of this folder's ops."""
