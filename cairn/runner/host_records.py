"""Records in host memory, and copies between them and the pools on the device."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.cache.host import STATE, Move
from cairn.cache.pools import CachePools
from cairn.cache.record import RecordLayout, layouts
from cairn.distributed.groups import ALONE, Group
from cairn.runner.shared_memory import SharedMemory

BLOCK = 8 << 20
"""Bytes of records that are copied at a time."""


class HostRecords:
    """Slots for records in host memory, by kind, with a checksum of each.

    Args:
        pools: the device pools.
        counts: number of slots, by kind.
        group: ranks whose records are moved together.
        shared: the memory can be mapped by other processes, see `SharedMemory`; when `move` into
            host memory returns, it is complete on all ranks.

    Attributes:
        memories: the memory of every rank, mapped by rank 0; empty on other ranks, and if not
            shared.
    """

    def __init__(
        self,
        pools: CachePools,
        counts: Sequence[int],
        group: Group = ALONE,
        shared: bool = False,
    ) -> None:
        self.counts, self._group = tuple(counts), group
        self.layouts = layouts(pools.schema)
        self._pools = pools
        self._device = next(iter((*pools.tensors(), *pools.states()))).device
        sizes = [layout.nbytes for layout in self.layouts]
        self.memories: list[SharedMemory] = []
        self._shared = shared
        if shared:
            memory = SharedMemory.new(self.counts, sizes)
            self._rows = [torch.from_numpy(rows) for rows in memory.rows]
            self._sums = memory.sums
            address = torch.tensor(memory.address, device=self._device)
            others = group.gathered(address).tolist()[1:]
            if group.rank == 0:
                mapped = [SharedMemory.of((pid, fd), counts, sizes) for pid, fd in others]
                self.memories = [memory, *mapped]
            # Kept open until rank 0 has mapped it.
            group.least(0, self._device)
            memory.close()
        else:
            pinned = self._device.type == "cuda"
            self._rows = [
                torch.empty((count, size), dtype=torch.uint8, pin_memory=pinned)
                for count, size in zip(counts, sizes, strict=True)
            ]
            self._sums = [np.zeros(count, dtype=np.int64) for count in counts]
        self._bytes: list[NDArray[np.uint8]] = [rows.numpy() for rows in self._rows]

    @torch.inference_mode()
    def move(self, moves: Sequence[Move], into_host: bool) -> list[Move]:
        """Execute moves; see `cairn.cache.host.Mover`."""
        damaged: list[Move] = []
        for kind, layout in enumerate(self.layouts):
            own = [move for move in moves if move.kind == kind]
            step = max(1, BLOCK // max(1, layout.nbytes))
            for begin in range(0, len(own), step):
                block = own[begin : begin + step]
                if into_host:
                    self._store(kind, block)
                else:
                    damaged += [move for move in block if not self.intact(kind, move.slot)]
                    self._load(kind, block)
        if not into_host:
            return self._on_any_rank(damaged, moves)
        if self._shared:
            self._group.least(0, self._device)
        return damaged

    def _on_any_rank(self, damaged: Sequence[Move], moves: Sequence[Move]) -> list[Move]:
        """The moves that found a damaged record on any rank."""
        bad = set(damaged)
        own = torch.tensor([move in bad for move in moves], device=self._device)
        every = self._group.gathered(own).any(0).tolist()
        return [move for move, found in zip(moves, every, strict=True) if found]

    def record(self, kind: int, slot: int) -> memoryview:
        """The bytes of a record, to be written in place; `seal` follows."""
        return memoryview(self._bytes[kind][slot])

    def content(self, kind: int, slot: int) -> memoryview:
        """The bytes of a record, to be read."""
        return self.record(kind, slot)

    def regions(self) -> list[tuple[int, int]]:
        """Address and bytes of the memory of each kind that has any."""
        return [(rows.data_ptr(), rows.nbytes) for rows in self._rows if rows.nbytes]

    def place(self, kind: int, slot: int) -> tuple[int, int]:
        """Address and bytes of a record."""
        size = self.layouts[kind].nbytes
        return self._rows[kind].data_ptr() + slot * size, size

    def seal(self, kind: int, slot: int) -> int:
        """Store the checksum of the record's current bytes; returns it."""
        found = zlib.crc32(self._bytes[kind][slot])
        self._sums[kind][slot] = found
        return found

    def sum_of(self, kind: int, slot: int) -> int | None:
        """The stored checksum; None: the record is known to be damaged."""
        return int(self._sums[kind][slot])

    def intact(self, kind: int, slot: int) -> bool:
        """Whether the bytes still match the stored checksum."""
        return zlib.crc32(self._bytes[kind][slot]) == int(self._sums[kind][slot])

    def _store(self, kind: int, moves: Sequence[Move]) -> None:
        index = self._index(kind, moves)
        layout = self.layouts[kind]
        block = torch.zeros((len(moves), layout.nbytes), dtype=torch.uint8, device=self._device)
        for place, field in self._fields(kind, layout):
            block[:, place] = field[index]
        slots = [move.slot for move in moves]
        self._rows[kind][torch.tensor(slots)] = block.cpu()
        for slot in slots:
            self.seal(kind, slot)

    def _load(self, kind: int, moves: Sequence[Move]) -> None:
        index = self._index(kind, moves)
        slots = torch.tensor([move.slot for move in moves])
        block = self._rows[kind][slots].to(self._device)
        for place, field in self._fields(kind, self.layouts[kind]):
            field[index] = block[:, place]

    def _index(self, kind: int, moves: Sequence[Move]) -> Tensor:
        """Device indices of the records."""
        first = self._pools.first_snapshot if kind == STATE else 0
        return torch.tensor([first + move.page for move in moves], device=self._device)

    def _fields(self, kind: int, layout: RecordLayout) -> Iterator[tuple[slice, Tensor]]:
        """For each field its range in a record, and its bytes [pages or states, n] on the
        device."""
        every = self._pools.rows if kind == STATE else self._pools.pages
        for part in layout.parts:
            field = every[part.layer][part.name]
            flat = field.view(len(field), -1).view(torch.uint8)
            yield slice(part.begin, part.begin + part.nbytes), flat
