"""Blocks of device memory through which records pass on their way to host memory and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 32 << 20
BLOCK_ON_CPU = 2 << 20
"""Bytes of a block; of the largest record, if that is larger. On the CPU it should stay in the
cache."""
Slots = Sequence[int]


class RecordBlocks:
    """Two blocks, used in turn: one is copied to host memory while the other is filled.

    Args:
        device: of the blocks.
        largest: bytes of the largest record.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        size = max(largest, BLOCK if on_gpu else BLOCK_ON_CPU)
        self._blocks = torch.empty((2 if on_gpu else 1, size), dtype=torch.uint8, device=device)
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def split(self, size: int, slots: Slots) -> Iterator[tuple[Tensor, slice]]:
        """Split a move of records of `size` bytes: a block [n, size] and its range of `slots`.

        Work that is queued next on the current stream may write to the block.
        """
        step = self._blocks.shape[1] // size
        for begin in range(0, len(slots), step):
            some = slice(begin, min(begin + step, len(slots)))
            self._turn = (self._turn + 1) % len(self._blocks)
            copied = self._copied[self._turn]
            if copied is not None:
                torch.cuda.current_stream(self._device).wait_event(copied)
            block = self._blocks[self._turn, : (some.stop - begin) * size]
            yield block.view(-1, size), some

    def copy_out(self, block: Tensor, rows: Tensor, slots: Slots) -> torch.cuda.Event | None:
        """rows[slots] = block, the last of `split`. On a GPU the copy is queued beside later steps;
        returns the event of its end."""
        if self._copies is None:
            _copy_runs(rows, slots, block, out=True)
            return None
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            _copy_runs(rows, slots, block, out=True)
        copied: torch.cuda.Event = self._copies.record_event()
        self._copied[self._turn] = copied
        return copied

    def copy_in(self, block: Tensor, rows: Tensor, slots: Slots) -> None:
        """block = rows[slots], queued on the current stream."""
        _copy_runs(rows, slots, block, out=False)


def _copy_runs(rows: Tensor, slots: Slots, block: Tensor, out: bool) -> None:
    """Copy between rows[slots] and a block: one copy for each run of consecutive slots."""
    begin = 0
    for end in range(1, len(slots) + 1):
        if end < len(slots) and slots[end] == slots[end - 1] + 1:
            continue
        run, own = rows[slots[begin] : slots[end - 1] + 1], block[begin:end]
        if out:
            run.copy_(own, non_blocking=True)
        else:
            own.copy_(run, non_blocking=True)
        begin = end
