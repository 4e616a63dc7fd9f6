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
STEPS_ON_THE_WAY = 3
"""Steps whose numbers may be on their way at once before the host waits."""


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


class Lines:
    """Numbers of one step after the other, written to the same memory of a GPU in one copy each.

    Args:
        padding: [lines, width] int64, what stands where a step has nothing.
        device: a GPU.

    Attributes:
        device: [lines, width] int64 there; what it holds are the padding's dtype or as many bytes
            of another one.
    """

    def __init__(self, padding: NDArray[np.int64], device: torch.device) -> None:
        self.device = torch.zeros(padding.shape, dtype=torch.int64, device=device)
        self._padding = padding
        self._buffers = [_LinesOnTheWay(padding.shape) for _ in range(STEPS_ON_THE_WAY)]
        self._turn = 0

    def send(self, arrays: Sequence[Numbers]) -> None:
        """Queue a step's numbers, one array a line, with padding behind them."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        # Long over, unless so many steps are on their way.
        buffer.sent.synchronize()
        buffer.lines[self._padding.dtype][: len(arrays)] = self._padding[: len(arrays)]
        for i, array in enumerate(arrays):
            buffer.lines[array.dtype][i, : len(array)] = array
        self.device.copy_(buffer.host, non_blocking=True)
        buffer.sent.record()


class _LinesOnTheWay:
    """Pinned memory of one step: as a tensor, as arrays by dtype, and when it may be reused."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.host = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        lines: Numbers = self.host.numpy()
        self.lines = {np.dtype(t): lines.view(t) for t in (np.int64, np.int32, np.float32)}
        self.sent = torch.cuda.Event()


class Arriving:
    """Tokens on their way to the host.

    Args:
        tokens: [n] int64 on the device; may be overwritten by what is queued later.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tokens
        if tokens.device.type != "cpu":
            self._host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tokens(self) -> list[int]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._host.tolist()
        return found
