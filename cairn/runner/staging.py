"""Numbers of a step on their way between the host and the device, without a wait on either side.

A copy from or to pinned memory is queued like a kernel; one of any other memory may wait for all
that was queued before it. PyTorch's host allocator gives pinned memory out again once the copies
that use it are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.number[Any]]

ALIGNMENT = 16
"""Bytes on whose multiples tensors begin: kernels are compiled once for all of them."""


def send(arrays: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of the same shapes and dtypes on the device, in one copy.

    On the CPU an array is its tensor: it must stay as it is.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    flat, begin = buffer.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += size
    parts = buffer.to(device, non_blocking=True).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


class Arriving:
    """Tokens on their way to the host.

    Args:
        tokens: [n] int64 on the device; may be overwritten by what is queued later.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tokens
        if tokens.device.type != "cpu":
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tokens(self) -> list[int]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._host.tolist()
        return found
