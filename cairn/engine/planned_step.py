"""A step that the scheduler is planning."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.engine.budget import Load, StepTimes
from cairn.engine.request import Request
from cairn.runner.step import (
    NO_ROWS,
    DecodeWork,
    PageGrant,
    RowOpen,
    RowWork,
    StateCopy,
    StepPlan,
)

DECODED_PAGES = 4
"""Pages between snapshots of a decoding row's state."""
WHOLE_PAGES = 4
"""A prefill chunk of at least this many pages that is cut to fit a step ends at a page border:
attention runs faster on whole pages, and the lost part is small."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold.

    Attributes:
        max_rows: requests that run at once.
        step_slots: most slots of a step (plus one if a single token fills a page).
        step_seconds: longest desired step while rows decode; prefill is cut to fit. None: no limit.
    """

    max_rows: int
    step_slots: int
    step_seconds: float | None = None


@dataclass(slots=True)
class PlannedStep:
    """The work of a step and the requests that it belongs to.

    Attributes:
        budget: remaining slots.
        load: its work so far, for time estimates.
        opened, grants, decode, work, restored, kept: see `StepPlan`.
        requests: of the rows that decode, then of `work`.
        constrained: index of a choice -> the request that makes it under a grammar.
    """

    budget: int
    load: Load = field(default_factory=Load)
    opened: list[RowOpen] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    restored: list[StateCopy] = field(default_factory=list)
    kept: list[StateCopy] = field(default_factory=list)
    decode: DecodeWork = NO_ROWS
    work: list[RowWork] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    constrained: Mapping[int, Request] = field(default_factory=dict)

    def plan(self, step_id: int, closed: Sequence[int]) -> StepPlan:
        """The StepPlan, which first closes the rows `closed`."""
        return StepPlan(
            step_id,
            tuple(closed),
            tuple(self.opened),
            tuple(self.grants),
            tuple(self.work),
            self.decode,
            tuple(self.constrained),
            tuple(self.restored),
            tuple(self.kept),
        )

    def room(self, first: int, limits: Limits, times: StepTimes, slots: SlotMap) -> int:
        """Remaining slots for a row's prefill after its first `first` tokens.

        While rows decode it is limited by step_seconds; the first row in order gets at least a
        page, so that it always makes progress, and other rows get at least a page or nothing.
        """
        if limits.step_seconds is None or self.load.rows == 0:
            return max(0, self.budget)
        size = slots.page_size
        room = times.room(self.load, first, limits.step_seconds)
        if room < size:
            room = 0 if self.load.chunks else size
        room = max(0, min(room, self.budget))
        if room >= WHOLE_PAGES * size:
            room -= (int(slots.slots_for(first)) + room) % size
        return room

    def announce(self, request: Request, cache: PageCache) -> None:
        """Add to the plan what the runner does not know yet of a row: the row itself, its state,
        its pages."""
        if not request.opened:
            self.opened.append(_row_open(request))
            request.opened = True
        lease = request.lease
        assert lease is not None
        if len(lease.pages) > request.granted:
            pages = tuple(lease.pages[request.granted :])
            own = tuple(lease.window[-len(pages) :])
            self.grants.append(PageGrant(request.row, request.granted, pages, own))
            request.granted = len(lease.pages)
        snapshot = cache.resume(lease)
        if snapshot is not None:
            self.restored.append(StateCopy(request.row, snapshot))

    def constrain(self, request: Request) -> None:
        """Mark the work that is added next as constrained if its request has a grammar."""
        if request.grammar is not None:
            number = len(self.decode.row) + sum(work.choices for work in self.work)
            self.constrained = {**self.constrained, number: request}

    def count(self, request: Request, end: int, slots: SlotMap) -> None:
        """Account for the work added last, which runs a request's tokens up to `end`."""
        work = self.work[-1]
        self.load.add(work)
        self.requests.append(request)
        self.budget -= int(slots.slots_for(end)) - int(slots.slots_for(work.first))
        self.budget -= sum(1 + len(guesses) for guesses in work.branches)

    def keep_state(self, request: Request, end: int, cache: PageCache) -> None:
        """Plan a snapshot of a row's state after its first `end` tokens, which this step completes,
        if one is due there."""
        lease, per_page = request.lease, cache.slots.tokens_per_page
        if cache.states is None or lease is None or end % per_page:
            return
        pages = end // per_page
        if request.decoding:
            wanted = pages % DECODED_PAGES == 0
        else:
            wanted = pages in cache.snapshot_borders(lease, len(request.tokens))
        if not wanted:
            return
        snapshot = cache.take_snapshot(lease, pages, trailing=request.decoding)
        if snapshot is not None:
            self.kept.append(StateCopy(request.row, snapshot))


def chunk(request: Request, budget: int, cache: PageCache) -> int:
    """User tokens that a request prefills: at least one, at most as many as fill `budget` slots,
    and none behind the next page border that should have a snapshot."""
    slots = cache.slots
    count = max(1, min(request.pending, slots.fitting(request.planned, budget)))
    if cache.states is None or request.lease is None:
        return count
    for pages in cache.snapshot_borders(request.lease, len(request.tokens)):
        border = pages * slots.tokens_per_page - request.planned
        if border > 0:
            return min(count, border)
    return count


def decoded_border(cache: PageCache) -> int | None:
    """Tokens between state snapshots of a decoding row; None: the model has no states."""
    return None if cache.states is None else DECODED_PAGES * cache.slots.tokens_per_page


def _row_open(request: Request) -> RowOpen:
    params = request.params
    return RowOpen(
        row=request.row,
        request_id=request.id,
        params=params,
        seed=request.seed,
        history=array("q", request.tokens) if params.penalized else (),
        num_prompt=request.num_prompt,
        stop_ids=request.stop_ids,
        media=request.media,
    )
