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


class _Stream:
    """The stream in use on a GPU. PyTorch makes a new object of it for everyone who asks, which
    takes longer than what is done with it: here that is made when it has changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.current_stream(device)

    def now(self) -> torch.cuda.Stream:
        """That of this moment."""
        if torch._C._cuda_getCurrentRawStream(self._index) != self._stream.cuda_stream:
            self._stream = torch.cuda.current_stream(self._device)
        return self._stream


class Trip:
    """Pinned memory of a step on a GPU: its numbers on their way there, its tokens on theirs back.

    What it holds already is not written again: most numbers stay the same from step to step. The
    arrays that are written must therefore stay as they are.

    Args:
        padding: one number a line, what stands behind its numbers.
        width: numbers in a line.
        stream: the one in use.
        free: where it waits for another step once its tokens have arrived.
    """

    def __init__(
        self, padding: Sequence[int], width: int, stream: _Stream, free: list[Trip]
    ) -> None:
        self.numbers = torch.zeros(len(padding), width, dtype=torch.int64, pin_memory=True)
        lines: Numbers = self.numbers.numpy()
        lines[:] = np.array(padding, dtype=np.int64)[:, None]
        self._lines = {np.dtype(t): list(lines.view(t)) for t in (np.int64, np.int32, np.float32)}
        self._held: list[Numbers] = [lines[:0]] * len(padding)
        self._padding = padding
        self._memory = torch.zeros(width, dtype=torch.int64, pin_memory=True)
        self._tokens = self._memory
        self._found: NDArray[np.int64] = self._tokens.numpy()
        self._arrived = torch.cuda.Event()
        self._stream = stream
        self._free = free

    def write(self, arrays: Sequence[Numbers]) -> None:
        """Put one array [n <= width] into each line, with padding behind it."""
        held = self._held
        for i, array in enumerate(arrays):
            if held[i] is array:
                continue
            line, count = self._lines[array.dtype][i], len(array)
            line[:count] = array
            if len(held[i]) != count:
                line[count:] = self._padding[i]
            held[i] = array

    def bring(self, tokens: Tensor) -> None:
        """Queue the way back of tokens [n <= width] int64, which may be overwritten by what is
        queued later."""
        count = tokens.size(0)
        if len(self._found) != count:
            self._tokens = self._memory[:count]
            self._found = self._tokens.numpy()
        self._tokens.copy_(tokens, non_blocking=True)
        self._arrived.record(self._stream.now())

    def tokens(self) -> list[int]:
        """Wait for what was brought, to be asked for once: the next step may have this memory."""
        self._arrived.synchronize()
        found: list[int] = self._found.tolist()
        self._free.append(self)
        return found


class Lines:
    """Numbers of one step after the other, written to the same memory of a GPU in one copy each.

    Args:
        padding: one number a line, what stands where a step has nothing.
        width: numbers in a line.
        device: a GPU.

    Attributes:
        device: [lines, width] int64 there; what a line holds are int64 or as many bytes of another
            dtype.
    """

    def __init__(self, padding: Sequence[int], width: int, device: torch.device) -> None:
        self.device = torch.zeros(len(padding), width, dtype=torch.int64, device=device)
        self._padding = tuple(padding)
        self._stream = _Stream(device)
        self._free: list[Trip] = []

    def send(self, arrays: Sequence[Numbers]) -> Trip:
        """Queue a step's numbers, one array a line, with padding behind them. The step must bring
        its tokens with the trip that is returned: until these have arrived it is of no other."""
        trip = self._free.pop() if self._free else self._another()
        trip.write(arrays)
        self.device.copy_(trip.numbers, non_blocking=True)
        return trip

    def _another(self) -> Trip:
        return Trip(self._padding, self.device.shape[1], self._stream, self._free)


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
