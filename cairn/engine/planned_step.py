"""A step while the scheduler plans it."""

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
"""A row that decodes leaves a snapshot of its state behind every so many pages."""
WHOLE_PAGES = 4
"""From this many pages on a chunk cut to fit a step ends with a page: attention runs faster on
whole pages, and what is left out no longer matters."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold.

    Attributes:
        max_rows: requests that run at once.
        step_slots: slots that one step may run, and one more where a single token fills a page.
        step_seconds: what a step should take at most while rows decode: prefill is cut to fit.
            None: no limit.
    """

    max_rows: int
    step_slots: int
    step_seconds: float | None = None


@dataclass(slots=True)
class PlannedStep:
    """What a step will run, and for whom.

    Attributes:
        budget: slots that it has left.
        load: what it runs so far, for estimates of its time.
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
        """The plan of this step, which closes some rows first."""
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
        """Slots that the step has left for a row's prefill after its first `first` tokens.

        Beside rows that decode it is what the step's seconds allow: at least a page for the first
        row in order, so that it moves on however short they are; no other gets less than a page.
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
        """Tell the runner of a row, its state and pages that it does not know yet."""
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
        """The work that is added next chooses under its request's grammar, if there is one."""
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
        """Leave a snapshot of a row's state behind its first `end` tokens, which this step
        completes, where one should be."""
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
    """Behind every so many tokens a row that decodes leaves a snapshot of its state; None: it has
    no state."""
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
