"""The kernels of this family."""
