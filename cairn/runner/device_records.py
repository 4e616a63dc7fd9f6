"""Records in GPU memory, which other GPUs of the host can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cairn.cache.host import STATE, Move
from cairn.cache.pools import CachePools
from cairn.cache.record import layouts
from cairn.runner.record_fields import RecordFields


class DeviceRecords:
    """Records in the memory of the pools' device. They have no checksums.

    Args:
        pools: source and target of the records.
        counts: number of slots, by kind.

    Attributes:
        rows: by kind, [count, bytes of a record] uint8.
        loaded: recorded after the last moves to the pools; None: there were none.
    """

    def __init__(self, pools: CachePools, counts: Sequence[int]) -> None:
        self.counts, self.layouts = tuple(counts), layouts(pools.schema)
        self._pools = pools
        self._fields = [RecordFields(pools, *kind) for kind in enumerate(self.layouts)]
        self.loaded: torch.cuda.Event | None = None
        self.device = next(iter((*pools.tensors(), *pools.states()))).device
        self.rows = [
            torch.empty((count, layout.nbytes), dtype=torch.uint8, device=self.device)
            for count, layout in zip(counts, self.layouts, strict=True)
        ]

    @torch.inference_mode()
    def move(self, moves: Sequence[Move], into_records: bool) -> list[Move]:
        """Execute moves, see `cairn.cache.host.Mover`. Waits for moves into records, which other
        processes may read afterwards."""
        for kind in range(len(self.layouts)):
            own = [move for move in moves if move.kind == kind]
            if not own:
                continue
            first = self._pools.first_snapshot if kind == STATE else 0
            index, slots = (
                torch.tensor(numbers, device=self.device)
                for numbers in ([first + move.page for move in own], [move.slot for move in own])
            )
            for record, field in self._fields[kind].beside(self.rows[kind]):
                if into_records:
                    record[slots] = field[index]
                else:
                    field[index] = record[slots]
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if into_records:
                stream.synchronize()
            else:
                self.loaded = stream.record_event()
        return []
