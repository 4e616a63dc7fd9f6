"""Copies of a step's inputs and outputs between host and device, without a wait on either side.

A copy from or to pinned memory is asynchronous; one of pageable memory may wait for all work queued
before it. PyTorch's host allocator gives pinned memory out again once the copies that use it are
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn import ops

Numbers = NDArray[np.number[Any]]

ALIGNMENT = 16
"""Alignment of tensors in bytes: kernels are specialised on it."""
RING = 4
"""Most steps in flight at once; for another one the host waits for the first."""


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


def send_stacked(arrays: Sequence[Numbers], device: torch.device) -> Tensor:
    """Arrays [W] of one dtype as one tensor [n, W] on the device, in one copy."""
    dtype = torch.from_numpy(arrays[0][:0]).dtype
    shape = len(arrays), len(arrays[0])
    stacked = torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")
    np.concatenate(arrays, out=stacked.numpy().reshape(-1))
    return stacked.to(device, non_blocking=True)


def overwrite(memory: Tensor, numbers: Numbers) -> None:
    """Queue a copy of an array to a device tensor of the same shape and dtype."""
    pinned = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.is_cuda)
    pinned.numpy()[:] = numbers
    memory.copy_(pinned, non_blocking=True)


class _Stream:
    """The current stream on a GPU, cached: PyTorch creates a new object on each query, which takes
    longer than the use of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.current_stream(device)

    def now(self) -> torch.cuda.Stream:
        """The current stream."""
        if torch._C._cuda_getCurrentRawStream(self._index) != self._stream.cuda_stream:
            self._stream = torch.cuda.current_stream(self._device)
        return self._stream


class _Ring:
    """Ring of pinned buffers for the steps in flight, and a counter of those that the GPU has
    begun."""

    def __init__(
        self, padding: Sequence[int], width: int, device: torch.device, guesses: int
    ) -> None:
        self.numbers = torch.zeros(RING, len(padding), width, dtype=torch.int64, pin_memory=True)
        self.numbers.copy_(torch.tensor(padding, dtype=torch.int64)[:, None])
        self.tokens = torch.zeros(RING, width, dtype=torch.int64, pin_memory=True)
        self.guesses = torch.zeros(RING, width * guesses, dtype=torch.int64, pin_memory=True)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)


class Trip:
    """The copies of a step in flight, to the GPU and back."""

    __slots__ = ("_found", "_guesses", "_place")

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._found: list[int] | None = None
        self._guesses: list[list[int]] = []

    def returns(self, count: int) -> None:
        """Record that the work queued so far writes the step's tokens to host memory."""
        place = self._place
        if len(place.found) != count:
            place.found = place.tokens[:count].numpy()
        place.arrived.record(place.stream.now())

    def tokens(self) -> list[int]:
        """Wait for the step's tokens."""
        found = self._found
        if found is None:
            self._place.arrived.synchronize()
            found = self._found = self._place.found.tolist()
            if self._place.guesses.shape[1]:
                self._guesses = self._place.guesses[: len(found)].tolist()
        return found

    def guesses(self) -> list[list[int]]:
        """Wait for the draft layer's guesses after each of them."""
        self.tokens()
        return self._guesses


class _Place:
    """An entry of a ring: pinned memory for a step's inputs and its tokens.

    Lines that did not change are not written again, because most stay the same from step to step.
    The arrays that are passed must therefore not be changed by the caller.
    """

    def __init__(
        self,
        numbers: Tensor,
        tokens: Tensor,
        guesses: Tensor,
        padding: Sequence[int],
        stream: _Stream,
    ) -> None:
        lines: Numbers = numbers.numpy()
        self._lines = {np.dtype(t): list(lines.view(t)) for t in (np.int64, np.int32, np.float32)}
        self._held: list[Numbers] = [lines[:0]] * len(padding)
        self._padding = padding
        self.tokens = tokens
        self.guesses: NDArray[np.int64] = guesses.view(len(tokens), -1).numpy()
        self.found: NDArray[np.int64] = tokens.numpy()
        self.arrived = torch.cuda.Event()
        self.stream = stream
        self._trip: Trip | None = None

    def write(self, arrays: Sequence[Numbers]) -> Trip:
        """Write one array [n <= width] to each line, followed by padding."""
        if self._trip is not None:
            # Until its tokens have arrived, the step may still read the inputs that would be
            # overwritten.
            self._trip.tokens()
        held = self._held
        for i, array in enumerate(arrays):
            if held[i] is array:
                continue
            line, count = self._lines[array.dtype][i], len(array)
            line[:count] = array
            if len(held[i]) != count:
                line[count:] = self._padding[i]
            held[i] = array
        self._trip = trip = Trip(self)
        return trip


class Lines:
    """Inputs of consecutive steps, which each step fetches itself to a fixed GPU tensor: a CUDA
    graph reads new inputs at each replay without a separate copy.

    Args:
        padding: one value per line, which fills unused elements.
        width: elements per line.
        device: a GPU.
        guesses: number of guesses that are returned with each token.

    Attributes:
        device: [lines, width] int64 there; a line holds int64, or as many bytes of another dtype.
    """

    def __init__(
        self, padding: Sequence[int], width: int, device: torch.device, guesses: int = 0
    ) -> None:
        self.device = torch.zeros(len(padding), width, dtype=torch.int64, device=device)
        self._ring = _Ring(padding, width, device, guesses)
        self._rehearsed = _Ring(padding, width, device, guesses)
        stream, held = _Stream(device), self._ring
        ring = zip(held.numbers, held.tokens, held.guesses, strict=True)
        self._places = [_Place(*entry, tuple(padding), stream) for entry in ring]
        self._sent = 0

    def send(self, arrays: Sequence[Numbers]) -> Trip:
        """Set the inputs that the next step fetches: one array per line, followed by padding."""
        trip = self._places[self._sent % RING].write(arrays)
        self._sent += 1
        return trip

    def fetch(self, lines: int, width: int, rehearsal: bool = False) -> None:
        """Queue the fetch of the first `width` elements of the next step's first `lines` lines to
        `device`; a rehearsal fetches padding."""
        ring = self._rehearsed if rehearsal else self._ring
        ops.ring_read(self.device[:lines, :width], ring.numbers[:, :lines, :width], ring.count)

    def answer(
        self,
        tokens: Tensor,
        last_token: Tensor,
        rows: Tensor,
        rehearsal: bool = False,
        guesses: Tensor | None = None,
    ) -> None:
        """Queue the tokens [n <= width] int64 of the step that fetched last to the host, and to
        `last_token` at `rows` [n] for the next step; to the host also guesses [n, guesses]."""
        ring = self._rehearsed if rehearsal else self._ring
        if guesses is not None:
            ops.ring_write(guesses.flatten(), ring.guesses, ring.count)
        ops.ring_write(tokens, ring.tokens, ring.count, last_token, rows)


class Arriving:
    """Tensors being copied to the host.

    Args:
        parts: tensors on one device; later work may overwrite them.
    """

    def __init__(self, *parts: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = parts
        if parts[0].device.type != "cpu":
            self._host = tuple(
                torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts
            )
            for mine, part in zip(self._host, parts, strict=True):
                mine.copy_(part, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrays(self) -> list[Numbers]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        return [part.numpy() for part in self._host]

    def tokens(self) -> list[int]:
        """The first part, [n] int64, as a list."""
        found: list[int] = self.arrays()[0].tolist()
        return found
