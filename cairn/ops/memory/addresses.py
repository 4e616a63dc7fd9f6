"""Memory that is known by its address alone."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor_at(
    address: int, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """A tensor over memory that it does not own, and that must outlive it.

    Args:
        address: of the first number.
        stride: None: contiguous.
    """
    found = torch.empty(0, dtype=dtype, device=device)
    steps = stride if stride is not None else torch.empty(shape, device="meta").stride()
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    size = extent * dtype.itemsize if 0 not in shape else 0
    # A private name of torch, used here alone: there is no public one.
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    found.set_(storage, 0, shape, steps)
    return found
