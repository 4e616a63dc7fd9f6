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
from cairn.runner.staging import send
from cairn.runner.step import StepPlan

Ints = NDArray[np.int64]

LAST_TOKEN = -1
"""Stands for the token that was sampled last in the slot's row; only the device may know it yet."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's numbers on the host: what a Batch holds as tensors.

    Attributes:
        ids: [T], token ids or LAST_TOKEN.
        position, row, slot, location: [T], see Batch.
        window_location: [T], where keys and values of layers with pages of their own go; None
            without such layers.
        completed, completed_pages: [N], see Batch.
        start: [works], index in the batch of each work's first slot.
        last: [works], that of its last user token; a landmark may follow it.
    """

    ids: Ints
    position: Ints
    row: Ints
    slot: Ints
    location: Ints
    window_location: Ints | None
    completed: Ints
    completed_pages: Ints
    start: Ints
    last: Ints


class Rows:
    """The page table, kept on the host and mirrored on the device, and every row's last token,
    which goes from step to step on the device.

    Args:
        num_rows: requests that run at once.
        max_pages: pages of the longest sequence.
        slots: the arithmetic of slots and landmarks.
        landmark_id: token id that fills landmark slots.
        device: where batches live.
        windowed: some layers have pages of their own, and so a page table.

    Attributes:
        last_token: [num_rows + 1] int64 on the device; the one behind the rows belongs to padding.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        slots: SlotMap,
        landmark_id: int,
        device: torch.device,
        windowed: bool = False,
    ) -> None:
        self.slots = slots
        self.landmark_id = landmark_id
        self.device = device
        # The rows again, where some layers have a table of their own.
        self._host_tables = np.zeros((num_rows << windowed, max_pages), dtype=np.int32)
        # On the CPU the device's tables are the host's: one memory.
        self._tables = torch.from_numpy(self._host_tables).to(device)
        self._num_rows = num_rows
        self._table = self._tables[:num_rows]
        self._window_table = self._tables[num_rows:] if windowed else None
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def remember(self, rows: Tensor, tokens: Tensor) -> None:
        """Keep the tokens [n] sampled for `rows` [n]: a work without tokens runs its row's."""
        self.last_token[rows] = tokens

    @property
    def page_table(self) -> Tensor:
        """[num_rows, max_pages] int32 on the device; its address stays."""
        return self._table

    @property
    def window_table(self) -> Tensor | None:
        """The same for layers with pages of their own: what lies behind windows is stale."""
        return self._window_table

    def lay_out(self, plan: StepPlan) -> Layout:
        """Apply the plan's grants and lay out its work."""
        self._grant(plan)
        size, slots = self.slots.page_size, self.slots
        work_row = np.array([w.row for w in plan.work], dtype=np.int64)
        first_token = np.array([w.first for w in plan.work], dtype=np.int64)
        count = np.array([w.num_tokens for w in plan.work], dtype=np.int64)
        end_token = first_token + count
        first_slot = slots.slots_for(first_token)
        num_slots = slots.slots_for(end_token) - first_slot
        start = np.cumsum(num_slots) - num_slots

        row = np.repeat(work_row, num_slots)
        slot = np.arange(len(row)) + np.repeat(first_slot - start, num_slots)
        closing = slot % size == size - 1
        ids = self._token_ids(plan, slot, start, first_token, num_slots)
        page = self._host_tables[row, slot // size].astype(np.int64)
        window_location = None
        if self._window_table is not None:
            own = self._host_tables[row + self._num_rows, slot // size].astype(np.int64)
            window_location = own * size + slot % size
        completed = np.flatnonzero(closing)
        return Layout(
            ids=ids,
            position=np.asarray(slots.position_of(slot)),
            row=row,
            slot=slot,
            location=page * size + slot % size,
            window_location=window_location,
            completed=completed,
            completed_pages=page[completed],
            start=start,
            last=start + slots.slot_of(end_token - 1) - first_slot,
        )

    def batch(
        self,
        layout: Layout,
        backends: Mapping[int, tuple[AttentionBackend, AttentionLayer]],
        counters: Counters,
    ) -> Batch:
        """The layout as tensors on the device."""
        numbers = (layout.ids, layout.position, layout.row, layout.slot, layout.location)
        completed = (layout.completed, layout.completed_pages)
        own = () if layout.window_location is None else (layout.window_location,)
        window_table = self._window_table
        sent = send(numbers + completed + own, self.device)
        ids, position, row, slot, location, *pages = sent
        if (layout.ids == LAST_TOKEN).any():
            ids = filled(ids, row, self.last_token)
        return Batch(
            input_ids=ids,
            positions=position,
            row=row,
            slot=slot,
            location=location,
            page_table=self._table,
            completed=pages[0],
            completed_pages=pages[1],
            window_place=None if window_table is None else (window_table, pages[2]),
            max_slot=int(layout.slot.max()),
            first_slot=int(layout.slot[0]) if len(layout.start) == 1 else None,
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
        if all(work.tokens is None for work in plan.work):
            ids[user] = LAST_TOKEN
            return ids
        last = np.array([LAST_TOKEN], dtype=np.int64)
        ids[user] = np.concatenate(
            [
                last if work.tokens is None else np.asarray(work.tokens, dtype=np.int64)
                for work in plan.work
            ]
        )
        return ids

    def _grant(self, plan: StepPlan) -> None:
        if not plan.grants:
            return
        runs = [(grant.row, grant.first, grant.pages) for grant in plan.grants]
        if self._window_table is not None:
            for grant in plan.grants:
                first = grant.first + len(grant.pages) - len(grant.window)
                runs.append((grant.row + self._num_rows, first, grant.window))
        count = [len(run[2]) for run in runs]
        row = np.repeat([run[0] for run in runs], count)
        begin = np.array([run[1] for run in runs]) - (np.cumsum(count) - count)
        logical = np.arange(len(row)) + np.repeat(begin, count)
        pages = np.concatenate([run[2] for run in runs])
        self._host_tables[row, logical] = pages
        if self.device.type != "cpu":
            at_row, at_page, values = send((row, logical, pages), self.device)
            self._tables[at_row, at_page] = values.int()


def filled(ids: Tensor, row: Tensor, last_token: Tensor) -> Tensor:
    """Token ids [T] on the device, LAST_TOKEN replaced by `last_token` of the slot's row [T]."""
    return torch.where(ids == LAST_TOKEN, last_token[row], ids)
