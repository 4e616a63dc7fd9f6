"""Tuples of tensors in kernels."""

from __future__ import annotations

from cairn.ops.gpu import triton


@triton.jit
def with_one_more(values, value):
    """A tuple and one value behind it."""
    # Triton does not support unpacking into a tuple.
    return values + (value,)  # noqa: RUF005
