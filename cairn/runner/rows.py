"""A StepPlan as one ragged batch on the device. The only place where landmark ids appear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.attention.base import (
    CHUNK,
    LEAST_EARLY,
    ROUND,
    AttentionBackend,
    AttentionLayer,
    Batch,
    Front,
    alone,
)
from cairn.cache.landmarks import SlotMap
from cairn.runner.staging import send
from cairn.runner.step import Ints, StepPlan

LAST_TOKEN = -1
"""Stands for the token that was sampled last in the slot's row; only the device may know it yet."""


class Grants(NamedTuple):
    """What a step changes in the page tables.

    Attributes:
        cells: [G], cells counted through all rows.
        pages: [G] int32, what they hold now.
    """

    cells: Ints
    pages: NDArray[np.int32]


NO_GRANTS = Grants(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


class Layout(NamedTuple):
    """A step's numbers on the host: what a Batch holds as tensors.

    Attributes:
        ids: [T], token ids or LAST_TOKEN.
        position, row, slot, location: [T], see Batch.
        window_location: [T], where keys and values of layers with pages of their own go; None
            without such layers.
        completed, completed_pages: [N], see Batch.
        grants: what the plan changes in the page tables.
        start: [works], index in the batch of each work's first slot.
        last: [works], that of its last user token; a landmark may follow it.
        decoding: works in front that decode.
    """

    ids: Ints
    position: Ints
    row: Ints
    slot: Ints
    location: Ints
    window_location: Ints | None
    completed: Ints
    completed_pages: Ints
    grants: Grants
    start: Ints
    last: Ints
    decoding: int = 0

    @property
    def chunked(self) -> bool:
        """See Batch."""
        return len(self.slot) >= CHUNK * len(self.start)

    @property
    def alone(self) -> int:
        """See Batch."""
        slots, decode = len(self.slot), self.decoding == len(self.start)
        return slots if decode else alone(self.decoding, slots)

    def fronts(self, limits: Sequence[Front]) -> tuple[Front, ...]:
        """See Batch, where `fronts_of` are `limits`."""
        found, begin = [], self.alone
        for number, limit in enumerate(limits):
            late = self.slot[begin:] >= limit.slots
            count = int(late.argmax()) // ROUND * ROUND if late.any() else len(late)
            if count == len(late) > 0 or (number == 0 and count >= LEAST_EARLY):
                found.append(Front(count, limit.pages))
                begin += count
        return tuple(found)

    def within(self, begin: int, fronts: Sequence[Front], limits: Sequence[Front]) -> bool:
        """Whether the slots from `begin` on, and padding behind them, can be said to be `fronts`,
        where those of rows are `limits`."""
        most = {limit.pages: limit.slots for limit in limits}
        for count, pages in fronts:
            if (self.slot[begin : begin + count] >= most[pages]).any():
                return False
            begin += count
        return True

    def stretches(self) -> list[int]:
        """Row, first slot and number of slots of each work, one after the other."""
        count = np.diff(self.start, append=len(self.slot))
        stretches = (self.row[self.start], self.slot[self.start], count)
        return [int(n) for n in np.stack(stretches, axis=1).ravel()]


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
        last_token: [num_rows + 1] int64 on the device, -1 where a row could choose none; the one
            behind the rows belongs to padding.
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
        # The rows again, where some layers have a table of their own; and a row of nobody.
        self._host_tables = np.zeros(((num_rows << windowed) + 1, max_pages), dtype=np.int32)
        # On the CPU the device's tables are the host's: one memory.
        self._tables = torch.from_numpy(self._host_tables).to(device)
        self._num_rows = num_rows
        self._table = self._tables[:num_rows]
        self._window_table = self._tables[num_rows:-1] if windowed else None
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def remember(self, rows: Tensor, tokens: Tensor) -> None:
        """Keep the tokens [n] sampled for `rows` [n]: a work without tokens runs its row's."""
        self.last_token[rows] = tokens

    @property
    def tables(self) -> Tensor:
        """All page tables on the device [rows, max_pages] int32; the last row belongs to nobody."""
        return self._tables

    @property
    def page_table(self) -> Tensor:
        """[num_rows, max_pages] int32 on the device; its address stays."""
        return self._table

    @property
    def window_table(self) -> Tensor | None:
        """The same for layers with pages of their own: what lies behind windows is stale."""
        return self._window_table

    def lay_out(self, plan: StepPlan) -> Layout:
        """Apply the plan's grants to the host's tables, and lay out its work."""
        grants = self.grant(plan)
        size, slots = self.slots.page_size, self.slots
        work_row, first_token = plan.decode.row, plan.decode.first
        end_token = first_token + 1
        if plan.work:
            work_row = np.concatenate((work_row, [w.row for w in plan.work]))
            first_token = np.concatenate((first_token, [w.first for w in plan.work]))
            count = [w.num_tokens for w in plan.work]
            end_token = np.concatenate((end_token, first_token[len(end_token) :] + count))
        first_slot = slots.slots_for(first_token)
        num_slots = slots.slots_for(end_token) - first_slot
        start = num_slots.cumsum() - num_slots

        row = work_row.repeat(num_slots)
        slot = (first_slot - start).repeat(num_slots) + np.arange(len(row))
        logical = slot // size
        in_page = slot - logical * size
        closing = in_page == size - 1
        page = self._host_tables[row, logical].astype(np.int64)
        window_location = None
        if self._window_table is not None:
            own = self._host_tables[row + self._num_rows, logical].astype(np.int64)
            window_location = own * size + in_page
        completed = closing.nonzero()[0]
        return Layout(
            ids=self._token_ids(plan, closing),
            position=np.asarray(slots.position_of(slot)),
            row=row,
            slot=slot,
            location=page * size + in_page,
            window_location=window_location,
            completed=completed,
            completed_pages=page[completed],
            grants=grants,
            start=start,
            # A token that decodes is its work's first slot.
            last=start + slots.slot_of(end_token - 1) - first_slot if plan.work else start,
            decoding=len(plan.decode.row),
        )

    def batch(
        self,
        layout: Layout,
        backends: Mapping[int, tuple[AttentionBackend, AttentionLayer]],
        fronts: Sequence[Front] = (),
    ) -> Batch:
        """The layout as tensors on the device, and its pages in the tables there; fronts: of a row,
        see `fronts_of`."""
        if self.device.type != "cpu":
            write_cells(self._tables, layout.grants)
        numbers = (layout.ids, layout.position, layout.row, layout.slot, layout.location)
        completed = (layout.completed, layout.completed_pages)
        own = () if layout.window_location is None else (layout.window_location,)
        window_table = self._window_table
        sent = send(numbers + completed + own, self.device)
        ids, position, row, slot, location, *pages = sent
        if (layout.ids == LAST_TOKEN).any():
            ids = filled(ids, row, self.last_token)
        # The CPU's tiles are of one row each, and have nothing to save.
        on_cpu = self.device.type == "cpu"
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
            stretches=layout.stretches(),
            chunked=layout.chunked,
            alone=0 if on_cpu else layout.alone,
            fronts=() if on_cpu else layout.fronts(fronts),
            backends=backends,
        )

    def _token_ids(self, plan: StepPlan, closing: NDArray[np.bool_]) -> Ints:
        """Ids of every slot: user tokens in order, the landmark id at the ends of pages."""
        if not plan.work:
            ends = self.landmark_id if self.slots.landmarks else LAST_TOKEN
            return np.where(closing, ends, LAST_TOKEN)
        user = np.flatnonzero(~closing) if self.slots.landmarks else np.arange(len(closing))
        ids = np.full(len(closing), self.landmark_id, dtype=np.int64)
        last = np.full(len(plan.decode.row), LAST_TOKEN)
        ids[user] = np.concatenate(
            [last, *(np.asarray(work.tokens, dtype=np.int64) for work in plan.work)]
        )
        return ids

    def grant(self, plan: StepPlan) -> Grants:
        """Write the plan's grants to the host's tables."""
        if not plan.grants:
            return NO_GRANTS
        width = self._host_tables.shape[1]
        at: list[int] = []
        pages: list[int] = []
        for grant in plan.grants:
            begin = grant.row * width + grant.first
            end = begin + len(grant.pages)
            at += range(begin, end)
            pages += grant.pages
            if self._window_table is not None:
                end += self._num_rows * width
                at += range(end - len(grant.window), end)
                pages += grant.window
        grants = Grants(np.array(at, dtype=np.int64), np.array(pages, dtype=np.int32))
        self._host_tables.reshape(-1)[grants.cells] = grants.pages
        return grants


def write_cells(tables: Tensor, grants: Grants) -> None:
    """Apply a step's grants to a device's tables [rows, max_pages] int32."""
    if len(grants.cells):
        tables.view(-1).index_copy_(0, *send(grants, tables.device))


def filled(ids: Tensor, row: Tensor, last_token: Tensor) -> Tensor:
    """Token ids [T] on the device, LAST_TOKEN replaced by `last_token` of the slot's row [T].

    A row without a token to choose runs once more before the host knows: any token will do, but
    the model has none below 0.
    """
    return torch.where(ids == LAST_TOKEN, last_token[row].clamp(min=0), ids)
