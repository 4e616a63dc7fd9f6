"""Records in host memory, and copies between them and the pools on the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.cache.host import STATE, Move
from cairn.cache.pools import CachePools
from cairn.cache.record import checksum, layouts
from cairn.distributed.groups import ALONE, Group
from cairn.runner.record_blocks import RecordBlocks
from cairn.runner.record_fields import RecordFields
from cairn.runner.shared_memory import SharedMemory
from cairn.runner.staging import send


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
            self._sums = [np.zeros(count, dtype=np.uint64) for count in counts]
        self._bytes: list[NDArray[np.uint8]] = [rows.numpy() for rows in self._rows]
        self._fields = [RecordFields(pools, *kind) for kind in enumerate(self.layouts)]
        self._blocks = RecordBlocks(self._device, max(sizes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-checksums")
        self._checks: list[dict[int, Future[None]]] = [{} for _ in counts]
        self._fresh: set[tuple[int, int]] = set()
        self._loaded: torch.cuda.Event | None = None

    @torch.inference_mode()
    def move(self, moves: Sequence[Move], into_host: bool) -> list[Move]:
        """Execute moves; see `cairn.cache.host.Mover`. On a GPU they are only queued, and
        checksums of what is moved into host memory are computed in a thread."""
        damaged: list[Move] = []
        checks: list[Future[None]] = []
        for kind in range(len(self.layouts)):
            own = [move for move in moves if move.kind == kind]
            if not own:
                continue
            if into_host:
                checks += self._store(kind, own)
            else:
                damaged += [move for move in own if not self._loadable(kind, move.slot)]
                self._load(kind, own)
        if not into_host:
            return self._on_any_rank(damaged, moves)
        if self._shared:
            for check in checks:
                check.result()
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
        self._await(kind, slot)
        if self._loaded is not None:
            self._loaded.synchronize()
        return self.content(kind, slot)

    def content(self, kind: int, slot: int) -> memoryview:
        """The bytes of a record, to be read."""
        self._await(kind, slot)
        return memoryview(self._bytes[kind][slot])

    def regions(self) -> list[tuple[int, int]]:
        """Address and bytes of the memory of each kind that has any."""
        return [(rows.data_ptr(), rows.nbytes) for rows in self._rows if rows.nbytes]

    def place(self, kind: int, slot: int) -> tuple[int, int]:
        """Address and bytes of a record, to be read or written."""
        size = self.record(kind, slot).nbytes
        return self._rows[kind].data_ptr() + slot * size, size

    def seal(self, kind: int, slot: int) -> int:
        """Store the checksum of a record that was written in place; returns it."""
        found = self._seal(kind, slot)
        self._fresh.add((kind, slot))
        return found

    def sum_of(self, kind: int, slot: int) -> int | None:
        """The stored checksum; None: the record is known to be damaged."""
        self._await(kind, slot)
        return int(self._sums[kind][slot])

    def intact(self, kind: int, slot: int) -> bool:
        """Whether the bytes still match the stored checksum."""
        self._await(kind, slot)
        return checksum(self._bytes[kind][slot]) == int(self._sums[kind][slot])

    def _loadable(self, kind: int, slot: int) -> bool:
        """Whether a record may be loaded. The checksum of one that has just come from another
        engine was compared by the thread that received it."""
        if (kind, slot) in self._fresh:
            self._fresh.remove((kind, slot))
            return True
        return self.intact(kind, slot)

    def _seal(self, kind: int, slot: int) -> int:
        found = checksum(self._bytes[kind][slot])
        self._sums[kind][slot] = found
        return found

    def _await(self, kind: int, slot: int) -> None:
        """Wait until a record that is moved into host memory is complete."""
        check = self._checks[kind].get(slot)
        if check is not None:
            check.result()

    def _store(self, kind: int, moves: Sequence[Move]) -> list[Future[None]]:
        """Copy records into host memory; returns the computations of their checksums."""
        checks = []
        slots, index = self._places(kind, moves)
        for block, some in self._blocks.split(self.layouts[kind].nbytes, slots):
            for record, field in self._fields[kind].beside(block):
                torch.index_select(field, 0, index[some], out=record)
            own = slots[some]
            copied = self._blocks.copy_out(block, self._rows[kind], own)
            checks.append(self._thread.submit(self._check, kind, own, copied))
            self._checks[kind].update(dict.fromkeys(own, checks[-1]))
            self._fresh.difference_update((kind, slot) for slot in own)
        return checks

    def _check(self, kind: int, slots: Sequence[int], copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        for slot in slots:
            self._seal(kind, slot)

    def _load(self, kind: int, moves: Sequence[Move]) -> None:
        slots, index = self._places(kind, moves)
        for block, some in self._blocks.split(self.layouts[kind].nbytes, slots):
            self._blocks.copy_in(block, self._rows[kind], slots[some])
            for record, field in self._fields[kind].beside(block):
                field[index[some]] = record
        if self._device.type == "cuda":
            self._loaded = torch.cuda.current_stream(self._device).record_event()

    def _places(self, kind: int, moves: Sequence[Move]) -> tuple[list[int], Tensor]:
        """Slots of the records, and their indices in the pools [n] int64 on the device."""
        first = self._pools.first_snapshot if kind == STATE else 0
        (index,) = send([np.array([first + move.page for move in moves])], self._device)
        return [move.slot for move in moves], index
