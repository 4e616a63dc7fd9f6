"""A fake executor for tests, which checks plans and needs no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.cache.host import STATE, Move
from cairn.cache.landmarks import SlotMap
from cairn.errors import InvariantError
from cairn.runner.step import Ready, RowWork, StepPlan, StepResult


@dataclass(slots=True)
class _FakeRow:
    request_id: str
    pages: dict[int, int] = field(default_factory=dict)
    window: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    end: int = 0


class FakeExecutor:
    """Checks and answers plans like a Runner, for tests of scheduling and load tests.

    Every plan is checked: a row runs only while open, exactly after the tokens that ran before
    (or that its shared pages already hold), and only in pages granted to it.

    Args:
        slots: slot arithmetic.
        next_token: (request id, output index) -> the token that is "sampled".
        step_seconds: simulated duration of a step.
        reach: pages before its own that a query of window layers reads; None: no such layers.
        stateful: some layers have recurrent states: a row that resumes from a prefix must have
            restored the state after it.
    """

    def __init__(
        self,
        slots: SlotMap,
        next_token: Callable[[str, int], int],
        step_seconds: float = 0.0,
        reach: int | None = None,
        stateful: bool = False,
    ) -> None:
        self.slots = slots
        self.reach = reach
        self.stateful = stateful
        # Number of tokens before each snapshot.
        self._snapshots: dict[int, int] = {}
        self._host_states: dict[int, int] = {}
        self.next_token = next_token
        self.step_seconds = step_seconds
        self._rows: dict[int, _FakeRow] = {}

    def launch(self, plan: StepPlan) -> Ready:
        """Check the plan and answer as if it had run.

        Raises:
            InvariantError: the plan is impossible.
        """
        self._open_rows(plan)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        works = plan.row_by_row()
        tokens: list[int] = []
        counts: list[int] = []
        self._check_reads_and_writes(plan.step_id, works)
        for work in works:
            row = self._rows[work.row]
            chosen = self._choose(row.request_id, work)
            wrong = work.drafts + 1 - len(chosen) if work.sample else 0
            row.end = work.first + work.num_tokens
            if not self._runs_ahead(row, work):
                row.tokens = row.end - wrong
            tokens += chosen
            counts += [len(chosen)] if work.sample else []
        for number, snapshot in plan.kept:
            self._snapshots[snapshot] = self._rows[number].tokens
        drafted = any(work.drafts for work in works)
        return Ready(StepResult(plan.step_id, tokens, counts=counts if drafted else None))

    def move(self, moves: Sequence[Move], into_host: bool) -> Sequence[Move]:
        """Only moves the bookkeeping: a restored state has as many tokens before it as when it was
        stored."""
        for move in moves:
            if move.kind == STATE and into_host:
                self._host_states[move.slot] = self._snapshots[move.page]
            elif move.kind == STATE:
                self._snapshots[move.page] = self._host_states[move.slot]
        return ()

    def call(self, name: str, **arguments: Any) -> Any:
        """Calls are not checked."""

    def shutdown(self) -> None:
        """Forget every row."""
        self._rows.clear()

    def _open_rows(self, plan: StepPlan) -> None:
        """Close and open rows, grant pages and restore states."""
        for closed in plan.closed:
            self._require(closed in self._rows, f"row {closed} is closed but was not open")
            del self._rows[closed]
        for opened in plan.opened:
            self._require(opened.row not in self._rows, f"row {opened.row} is opened twice")
            self._rows[opened.row] = _FakeRow(opened.request_id)
        for grant in plan.grants:
            pages = self._rows[grant.row].pages
            complete = self.slots.complete_pages(self._rows[grant.row].tokens)
            for logical, page in enumerate(grant.pages, grant.first):
                kept = logical < complete or pages.get(logical, page) == page
                self._require(kept, f"row {grant.row} loses a page that is not complete")
                pages[logical] = page
            last = grant.first + len(grant.pages)
            self._rows[grant.row].window |= zip(
                range(last - len(grant.window), last), grant.window, strict=True
            )
        for number, snapshot in plan.restored:
            self._require(self._rows[number].tokens == 0, f"row {number} is restored in its midst")
            self._rows[number].tokens = self._snapshots[snapshot]

    def _check_reads_and_writes(self, step_id: int, works: Sequence[RowWork]) -> None:
        """Check that rows continue where they stopped, in pages granted to them."""
        writers: dict[int, int] = {}
        window_writers: dict[int, int] = {}
        for work in works:
            row = self._rows.get(work.row)
            if row is None:
                raise InvariantError(f"step {step_id}: row {work.row} runs but is not open")
            shared = row.tokens == 0 and not self.stateful
            ahead = work.first == row.end
            self._require(
                work.first == row.tokens or shared or ahead, f"row {work.row} skips tokens"
            )
            self._check_pages(row.pages, work, writers, None)
            if self.reach is not None:
                self._check_pages(row.window, work, window_writers, self.reach)
        for work in works if self.reach is not None else ():
            begin, window = self._first_page(work), self._rows[work.row].window
            for logical in range(max(0, begin - (self.reach or 0)), begin):
                other = window_writers.get(window[logical])
                self._require(other is None, f"row {other} writes under the window of {work.row}")

    def _choose(self, request_id: str, work: RowWork) -> list[int]:
        """The tokens that a work samples, up to the first that differs from its guess."""
        found: list[int] = []
        guesses = list(work.tokens[-work.drafts :]) if work.drafts and work.tokens else []
        for i in range(work.choices):
            found.append(self.next_token(request_id, work.output_index + i))
            if i < len(guesses) and found[-1] != guesses[i]:
                break
        return found

    def _runs_ahead(self, row: _FakeRow, work: RowWork) -> bool:
        """Whether a work ran ahead of wrong guesses, so that its tokens do not count."""
        if work.output_index == 0 or work.tokens is None:
            return False
        last = self.next_token(row.request_id, work.output_index - 1)
        return work.first > row.tokens or (work.drafts > 0 and work.tokens[0] != last)

    def _first_page(self, work: RowWork) -> int:
        """The logical page of the first slot that the work runs."""
        return int(self.slots.slots_for(work.first)) // self.slots.page_size

    def _check_pages(
        self, pages: dict[int, int], work: RowWork, writers: dict[int, int], reach: int | None
    ) -> None:
        """Check that the work's row has the pages that it reads, and is the only writer of those it
        writes."""
        begin, number = self._first_page(work), work.row
        end = int(self.slots.pages_for(work.first + work.num_tokens))
        low = 0 if reach is None else max(0, begin - reach)
        self._require(
            all(page in pages for page in range(low, end)), f"row {number} lacks a granted page"
        )
        for logical in range(begin, end):
            writer = writers.setdefault(pages[logical], number)
            self._require(writer == number, f"rows {writer} and {number} write one page")

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise InvariantError(f"impossible plan: {message}")
