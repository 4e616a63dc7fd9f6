"""Turns a StepPlan into one ragged batch on the device. The only module that writes token ids of
landmark slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.attention.batch import Batch, Inserted, StepRows
from cairn.cache.landmarks import SlotMap
from cairn.runner.buffers import StepArrays, StepFields
from cairn.runner.media import Insert, Placed, PromptMedia
from cairn.runner.staging import send
from cairn.runner.step import Ints, RowWork, StepPlan

LAST_TOKEN = -1
"""Placeholder for the last sampled token of the slot's row, which may only be known on the device
yet."""


class Grants(NamedTuple):
    """A step's changes of the page tables.

    Attributes:
        cells: [G], flat indices into the page table.
        pages: [G] int32, their new values.
    """

    cells: Ints
    pages: NDArray[np.int32]


NO_GRANTS = Grants(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


class Layout(NamedTuple):
    """A step laid out on the host.

    Attributes:
        arrays: the values of a Batch's tensors.
        rows: the rows that run, in the plan's order.
        last: [R], index in the batch of each row's last user token; a page's end may follow it.
        grants: the plan's changes of the page tables.
        inserts: embeddings that replace those of placeholder tokens.
    """

    arrays: StepArrays
    rows: StepRows
    last: Ints
    grants: Grants
    inserts: tuple[Insert, ...] = ()

    @property
    def slot(self) -> Ints:
        """[T], see Batch."""
        return self.arrays.slot

    @property
    def start(self) -> Ints:
        """[R], index in the batch of each row's first slot."""
        starts: Ints = self.rows.count.cumsum() - self.rows.count
        return starts


class Rows:
    """The page tables, kept on the host and mirrored on the device, and every row's last token,
    which stays on the device from step to step.

    Args:
        num_rows: requests that run at once, and the branches of their guesses.
        max_pages: pages of the longest sequence.
        slots: slot arithmetic.
        page_end_id: token id of landmark slots.
        device: device of batches.
        groups: page groups; each has a table.
        axes: rotary positions per token.

    Attributes:
        last_token: [num_rows + 1] int64 on the device, -1 where a row could choose none; the last
            entry is for padding.
        page_tables: by group, [num_rows, max_pages] int32 on the device; at fixed addresses. In the
            table of window layers, entries before the window are stale.
        num_requests: rows of requests (settable; all by default). Row i * num_requests + r is
            branch i of row r.
        shift: [num_rows + 1] int64 on the device, rotary position minus token index after a row's
            images; None: tokens have one position.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        slots: SlotMap,
        page_end_id: int,
        device: torch.device,
        groups: int = 1,
        axes: int = 1,
    ) -> None:
        self.slots = slots
        self.page_end_id = page_end_id
        self.device = device
        # The rows of each group, and a spare row for padding.
        self._host_tables = np.zeros((num_rows * groups + 1, max_pages), dtype=np.int32)
        # On the CPU the device's tables share the host's memory.
        self._tables = torch.from_numpy(self._host_tables).to(device)
        self._num_rows, self._groups = num_rows, groups
        self.num_requests = num_rows
        self.page_tables = self._tables[:-1].split(num_rows)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._axes, self._placed = axes, dict[int, Placed]()
        self.shift: Tensor | None = None
        if axes > 1:
            self.shift = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def open(self, row: int, media: PromptMedia | None) -> None:
        """Start a row with a prompt's images."""
        before = self._placed.pop(row, None)
        delta = 0 if before is None else before.delta
        if media is not None:
            self._placed[row] = Placed(media, self._axes)
        now = self._placed[row].delta if row in self._placed else 0
        if self.shift is not None and now != delta:
            self.shift[row] = now

    def close(self, row: int) -> None:
        """End a row."""
        self.open(row, None)

    def shifted(self, position: Tensor, row: Tensor) -> Tensor:
        """Rotary positions [n] of generated tokens of `rows` [n] with these token indices."""
        return position if self.shift is None else position + self.shift[row]

    def remember(self, rows: Tensor, tokens: Tensor) -> None:
        """Store the tokens [n] sampled for `rows` [n]; works without explicit tokens run them
        next."""
        self.last_token[rows] = tokens

    @property
    def tables(self) -> Tensor:
        """All page tables on the device, stacked as [rows, max_pages] int32; the last row is
        a spare one for padding."""
        return self._tables

    @property
    def capacity(self) -> int:
        """Slots of the longest sequence."""
        return self._tables.shape[1] * self.slots.page_size

    def page_of(self, row: int, logical: int, group: int) -> int:
        """The physical page of a row's logical page, from the host's table."""
        return int(self._host_tables[row + group * self._num_rows, logical])

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
        pages = [
            self._host_tables[row + group * self._num_rows, logical].astype(np.int64)
            for group in range(self._groups)
        ]
        completed = closing.nonzero()[0]
        position, inserts = np.asarray(slots.position_of(slot)), tuple[Insert, ...]()
        if self._placed:
            position, inserts = self._place(position, work_row, first_token, end_token, start)
        arrays = StepArrays(
            ids=self._token_ids(plan, closing),
            position=position,
            row=row,
            slot=slot,
            completed=completed,
            completed_pages=pages[0][completed],
            locations=tuple(page * size + in_page for page in pages),
        )
        drafts = None
        if any(work.drafts for work in plan.work):
            drafts = np.zeros(len(work_row), dtype=np.int64)
            drafts[len(plan.decode.row) :] = [work.drafts for work in plan.work]
        rows = StepRows(work_row, first_slot, num_slots, slot, len(plan.decode.row), drafts)
        # Rows that decode run one slot, so their first slot is their last.
        last = start + slots.slot_of(end_token - 1) - first_slot if plan.work else start
        return Layout(arrays, rows, last, grants, inserts)

    def batch(
        self, layout: Layout, watch: Ints | None = None, inserted: Inserted | None = None
    ) -> Batch:
        """The layout as tensors on the device, and its pages in the tables there.

        Args:
            watch: indices of queries whose selections are reported.
            inserted: embeddings that replace those of placeholder tokens.
        """
        if self.device.type != "cpu":
            write_cells(self._tables, layout.grants)
        fields = StepFields.sent(layout.arrays, self.device)
        if (layout.arrays.ids == LAST_TOKEN).any():
            fields = fields._replace(ids=filled(fields.ids, fields.row, self.last_token))
        watched = None if watch is None else torch.as_tensor(watch, device=self.device)
        return fields.batch(self.page_tables, int(layout.slot.max()), watched, inserted)

    def _place(
        self, position: Ints, row: Ints, first: Ints, end: Ints, start: Ints
    ) -> tuple[Ints, tuple[Insert, ...]]:
        """Rotary positions of a step with images: [T], or [axes, T] if some differ by axis; and the
        embeddings that it needs.

        Args:
            position: [T], as if all was text.
            row, first, end, start: [R], the rows, their tokens and where these begin in the step.
        """
        position, inserts = position.copy(), list[Insert]()
        for number, begin, behind, at in zip(
            *(part.tolist() for part in (row, first, end, start)), strict=True
        ):
            placed = self._placed.get(number)
            if placed is None:
                continue
            own = placed.positions(begin, behind)
            if len(own) > 1 and position.ndim == 1:
                position = np.tile(position, (len(own), 1))
            position[..., at : at + behind - begin] = own if position.ndim > 1 else own[0]
            inserts += placed.inserts(begin, behind, at)
        return position, tuple(inserts)

    def _token_ids(self, plan: StepPlan, closing: NDArray[np.bool_]) -> Ints:
        """Ids of every slot: user tokens in order, and `page_end_id` where a slot holds none."""
        if not plan.work:
            ends = self.page_end_id if self.slots.landmarks else LAST_TOKEN
            return np.where(closing, ends, LAST_TOKEN)
        user = np.flatnonzero(~closing) if self.slots.landmarks else np.arange(len(closing))
        ids = np.full(len(closing), self.page_end_id, dtype=np.int64)
        last = np.full(len(plan.decode.row), LAST_TOKEN)
        ids[user] = np.concatenate(
            [last, *(np.asarray(work.tokens, dtype=np.int64) for work in plan.work)]
        )
        return ids

    def grant(self, plan: StepPlan) -> Grants:
        """Write the plan's grants to the host's tables."""
        branches = [work for work in plan.work if work.row >= self.num_requests]
        if not (plan.grants or branches):
            return NO_GRANTS
        width = self._host_tables.shape[1]
        at: list[int] = []
        pages: list[int] = []
        for grant in plan.grants:
            begin = grant.row * width + grant.first
            end = begin + len(grant.pages)
            at += range(begin, end)
            pages += grant.pages
            if self._groups > 1:
                end += self._num_rows * width
                at += range(end - len(grant.window), end)
                pages += grant.window
        grants = Grants(np.array(at, dtype=np.int64), np.array(pages, dtype=np.int32))
        self._host_tables.reshape(-1)[grants.cells] = grants.pages
        return self._with_branches(grants, branches) if branches else grants

    def last_page(self, work: RowWork, branch: int, group: int) -> int:
        """The page that a row (branch 0) or one of its branches writes."""
        logical = int(self.slots.slot_of(work.first)) // self.slots.page_size
        return self.page_of(work.row, logical + branch, group)

    def _with_branches(self, grants: Grants, branches: Sequence[RowWork]) -> Grants:
        """Write the tables of branches too: the pages of their rows, except the last."""
        cells, pages = [grants.cells], [grants.pages]
        width = self._host_tables.shape[1]
        for work in branches:
            number, row = divmod(work.row, self.num_requests)
            end = int(self.slots.slot_of(work.first)) // self.slots.page_size + 1
            for group in range(self._groups):
                own = group * self._num_rows
                line = self._host_tables[own + row, :end].copy()
                line[-1] = self._host_tables[own + row, end - 1 + number]
                self._host_tables[own + work.row, :end] = line
                cells.append((own + work.row) * width + np.arange(end))
                pages.append(line)
        return Grants(np.concatenate(cells), np.concatenate(pages))


def write_cells(tables: Tensor, grants: Grants) -> None:
    """Apply a step's grants to a device's tables [rows, max_pages] int32."""
    if len(grants.cells):
        tables.view(-1).index_copy_(0, *send(grants, tables.device))


def filled(ids: Tensor, row: Tensor, last_token: Tensor) -> Tensor:
    """Token ids [T] on the device, LAST_TOKEN replaced by `last_token` of the slot's row [T].

    A row that could choose no token runs once more before the host knows that; it then runs token
    0, because ids below 0 are invalid.
    """
    return torch.where(ids == LAST_TOKEN, last_token[row].clamp(min=0), ids)
