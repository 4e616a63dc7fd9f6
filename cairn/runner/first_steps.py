"""The steps of a warm-up, one of every kind that needs other kernels; they belong to no request.

On a GPU a kernel is compiled per tile configuration, which depends on the number of tokens but not
on context lengths. So there are steps of few and of many tokens, also after the fronts of a row,
and decode steps of one row and of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cairn.runner.runner import RunnerShape
from cairn.runner.step import DecodeWork, PageGrant, RowOpen, RowWork, StepPlan
from cairn.types import SamplingParams

PAGES = 3
"""Pages of the only prompt on the CPU, which a decode step then reads."""
GPU_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 1024, 4096)
"""Lengths of the prompts on a GPU: each power of two to which kernels round a number of tokens, and
values between, so that with 4 heads or more the number of tiles is both below and above the number
of multiprocessors."""


class StepSeries(NamedTuple):
    """Steps that open rows with prefills, sample after the last one, decode once, and close the
    rows."""

    prefills: tuple[StepPlan, ...]
    decode: StepPlan
    close: StepPlan

    def without_decode(self) -> tuple[StepPlan, ...]:
        """All steps except the decode step."""
        return *self.prefills, self.close


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """Makes the steps.

    Args:
        shape: sizes of the runner.
        pages: number of pages in the pool; rows that need more are granted some pages twice, and
            the results are meaningless.
        window_pages: likewise of window layers; 0: they have no pages of their own.
        most: tokens of the longest sequence.
        chunk: tokens of the largest step.
        fronts: slots of a row from which on attention uses other kernels, see `Runner.front_slots`.
        draft_layer: whether the model has a draft layer.
    """

    shape: RunnerShape
    pages: int
    window_pages: int
    most: int
    chunk: int
    fronts: Sequence[int] = ()
    draft_layer: bool = False

    def prompts(self, on_gpu: bool) -> list[StepSeries]:
        """Prompts of one row."""
        slots, longest = self.shape.slots, max(1, min(self.most - 1, self.chunk))
        lengths: Iterable[int] = GPU_TOKENS
        if not on_gpu:
            lengths = (int(slots.tokens_in(PAGES * slots.page_size)) - 1,)
        lengths = sorted({max(1, min(n, longest)) for n in lengths})
        alone = [self._prompt([0, length]) for length in lengths]
        return alone + self.behind_fronts(lengths) if on_gpu else alone

    def behind_fronts(self, lengths: Sequence[int]) -> list[StepSeries]:
        """Steps of all lengths after each front of a row."""
        fronts = [int(self.shape.slots.tokens_in(slots)) + 1 for slots in self.fronts]
        return [steps for past in fronts for steps in self.behind(past, lengths)]

    def behind(self, past: int, lengths: Sequence[int]) -> list[StepSeries]:
        """Steps of all lengths in sequence, in a row that has `past` tokens, as far as the longest
        sequence allows, with one token left."""
        ends = itertools.accumulate(lengths, initial=past)
        held = itertools.takewhile(lambda n: n <= self.most - 1, ends)
        bounds = [*range(0, past, lengths[-1]), *held]
        return [self._prompt(bounds)] if bounds[-1] > past else []

    def rows(self) -> list[StepSeries]:
        """Steps of one token in one row, and in all rows."""
        return [self._tokens(count) for count in sorted({1, self.shape.num_rows})]

    def guesses(self) -> list[StepSeries]:
        """Steps of one row and of all rows with guesses after a prompt of one token; none without
        speculation, or if the longest sequence is too short."""
        drafts = self.shape.drafts
        if not drafts or 2 + 2 * drafts > self.most:
            return []
        ahead = drafts if self.draft_layer else 0
        each = int(self.shape.slots.pages_for(2 + 2 * drafts))
        found = []
        for count in sorted({1, self.shape.num_rows}):
            rows = range(count)
            grants = [self.granted(row, range(row * each, (row + 1) * each)) for row in rows]
            prefill = [RowWork(row, 0, [0], sample=True, ahead=ahead) for row in rows]
            tokens = [0] * (1 + drafts)
            verified = [
                RowWork(row, 1, tokens, True, 1, drafts=drafts, ahead=ahead) for row in rows
            ]
            found.append(_steps(grants, prefill, verified))
        return found

    def granted(self, row: int, pages: Iterable[int]) -> PageGrant:
        """The first pages of a row: the same numbers in all pools."""
        numbers = list(pages)
        window = (page % self.window_pages for page in numbers if self.window_pages)
        return PageGrant(row, 0, tuple(page % self.pages for page in numbers), tuple(window))

    def _prompt(self, bounds: Sequence[int]) -> StepSeries:
        """A prompt in row 0, cut into steps at these numbers of tokens."""
        prompt = [i % self.shape.vocab_size for i in range(bounds[-1])]
        grant = self.granted(0, range(int(self.shape.slots.pages_for(bounds[-1] + 1))))
        cuts = itertools.pairwise(bounds)
        works = ([RowWork(0, a, prompt[a:b], sample=b == bounds[-1])] for a, b in cuts)
        return _steps([grant], *works)

    def _tokens(self, count: int) -> StepSeries:
        """One token in each of `count` rows, each in its own page."""
        rows = range(count)
        prefill = [RowWork(row=row, first=0, tokens=[0], sample=True) for row in rows]
        return _steps([self.granted(row, (row,)) for row in rows], prefill)


def _steps(grants: Sequence[PageGrant], *works: Sequence[RowWork]) -> StepSeries:
    """Each of `works` is a step of the same rows."""
    rows = [work.row for work in works[-1]]
    ends = [work.first + work.num_tokens for work in works[-1]]
    first, *others = (StepPlan(-3, (), (), (), tuple(work)) for work in works)
    first = first._replace(opened=tuple(map(_opened, rows)), grants=tuple(grants))
    return StepSeries(
        (first, *others),
        StepPlan(-2, (), (), (), (), DecodeWork.of(rows, ends, [1] * len(rows))),
        StepPlan(-1, tuple(rows), (), (), ()),
    )


def _opened(row: int) -> RowOpen:
    params = SamplingParams(temperature=0)
    return RowOpen(row=row, request_id=f"warm-up-{row}", params=params, seed=0)
