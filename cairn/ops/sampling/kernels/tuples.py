"""Tuples of tensors in kernels."""

from __future__ import annotations

from cairn.ops.gpu import triton


@triton.jit
def appended(values, value):
    """A tuple with a value appended."""
    # Triton does not support unpacking into a tuple.
    return values + (value,)  # noqa: RUF005
