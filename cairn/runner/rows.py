"""A StepPlan as one ragged batch on the device. The only place where landmark ids appear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.attention.base import AttentionBackend, AttentionLayer, Batch, Counters
from cairn.cache.landmarks import SlotMap
from cairn.runner.step import StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's numbers on the host: what a Batch holds as tensors.

    Attributes:
        ids, position, row, slot, location: [T], see Batch.
        completed, completed_pages: [N], see Batch.
        start: [works], index in the batch of each work's first slot.
    """

    ids: Ints
    position: Ints
    row: Ints
    slot: Ints
    location: Ints
    completed: Ints
    completed_pages: Ints
    start: Ints


class Rows:
    """The page table and the last token of every row, kept on the host and mirrored on the device.

    Args:
        num_rows: requests that run at once.
        max_pages: pages of the longest sequence.
        slots: the arithmetic of slots and landmarks.
        landmark_id: token id that fills landmark slots.
        device: where batches live.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        slots: SlotMap,
        landmark_id: int,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.landmark_id = landmark_id
        self.device = device
        self._host_table = np.zeros((num_rows, max_pages), dtype=np.int32)
        # On the CPU the device's table is the host's: one memory.
        self._table = torch.from_numpy(self._host_table).to(device)
        self._last_token: Ints = np.zeros(num_rows, dtype=np.int64)

    def remember(self, row: int, token: int) -> None:
        """Keep the token sampled for `row`: a work without tokens runs it."""
        self._last_token[row] = token

    @property
    def page_table(self) -> Tensor:
        """[num_rows, max_pages] int32 on the device; its address stays."""
        return self._table

    def lay_out(self, plan: StepPlan) -> Layout:
        """Apply the plan's grants and lay out its work."""
        self._grant(plan)
        size, slots = self.slots.page_size, self.slots
        work_row = np.array([w.row for w in plan.work], dtype=np.int64)
        first_token = np.array([w.first for w in plan.work], dtype=np.int64)
        count = np.array([w.count for w in plan.work], dtype=np.int64)
        first_slot = slots.slots_for(first_token)
        num_slots = slots.slots_for(first_token + count) - first_slot
        start = np.cumsum(num_slots) - num_slots

        row = np.repeat(work_row, num_slots)
        slot = np.arange(len(row)) + np.repeat(first_slot - start, num_slots)
        closing = slot % size == size - 1
        ids = self._token_ids(plan, slot, start, first_token, num_slots)
        page = self._host_table[row, slot // size].astype(np.int64)
        completed = np.flatnonzero(closing)
        return Layout(
            ids=ids,
            position=np.asarray(slots.position_of(slot)),
            row=row,
            slot=slot,
            location=page * size + slot % size,
            completed=completed,
            completed_pages=page[completed],
            start=start,
        )

    def batch(
        self,
        layout: Layout,
        backends: Mapping[int, tuple[AttentionBackend, AttentionLayer]],
        counters: Counters,
    ) -> Batch:
        """The layout as tensors on the device."""
        return Batch(
            input_ids=self._send(layout.ids),
            positions=self._send(layout.position),
            row=self._send(layout.row),
            slot=self._send(layout.slot),
            location=self._send(layout.location),
            page_table=self._table,
            completed=self._send(layout.completed),
            completed_pages=self._send(layout.completed_pages),
            max_slot=int(layout.slot.max()),
            backends=backends,
            counters=counters,
        )

    def _token_ids(
        self, plan: StepPlan, slot: Ints, start: Ints, first_token: Ints, num_slots: Ints
    ) -> Ints:
        """Ids of every slot: user tokens in order, the landmark id where the arithmetic says."""
        ids = np.full(len(slot), self.landmark_id, dtype=np.int64)
        if self.slots.landmarks:
            user = np.flatnonzero(slot % self.slots.page_size != self.slots.page_size - 1)
        else:
            user = np.arange(len(slot))
        tokens: list[Ints] = []
        sampled: list[int] = []
        for work in plan.work:
            if work.tokens is None:
                sampled.append(work.row)
            else:
                if sampled:
                    tokens.append(self._last_token[sampled])
                    sampled = []
                tokens.append(np.asarray(work.tokens, dtype=np.int64))
        if sampled:
            tokens.append(self._last_token[sampled])
        ids[user] = np.concatenate(tokens)
        return ids

    def _grant(self, plan: StepPlan) -> None:
        for grant in plan.grants:
            span = slice(grant.first, grant.first + len(grant.pages))
            self._host_table[grant.row, span] = grant.pages
            if self.device.type != "cpu":
                self._table[grant.row, span] = self._send(self._host_table[grant.row, span])

    def _send(self, values: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)
