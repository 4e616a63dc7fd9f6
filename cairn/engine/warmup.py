"""Warm-up: runs steps of every kind before the first request, so that kernels are compiled.

On a GPU kernels are compiled when they first run, once for every way of cutting the work that the
number of tokens asks for, and graphs are captured; never for a length. So steps of few and of many
tokens run here, and decode steps of one row and of all. What these need is captured: the smallest
and the largest graphs. The engine captures the others while it is idle, or when a step needs one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cairn.engine.build import Built
from cairn.errors import BadModel
from cairn.ops.advice import compile_ahead
from cairn.runner.step import DecodeWork, PageGrant, RowOpen, RowWork, StepPlan
from cairn.types import SamplingParams

log = logging.getLogger(__name__)

PAGES = 3
"""Length of the warm-up prompt: complete pages, and a decode that reads them."""
GPU_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 1024, 4096)
"""Lengths of the prompts on a GPU: what is a power of two by number of tokens meets each there, and
what waits for as many tiles as a GPU has processors does with 4 heads and more."""


def warm_up(built: Built) -> None:
    """Run steps past the scheduler: its pages, counts and draws stay untouched.

    Raises:
        BadModel: the model's logits are not numbers.
    """
    began = time.perf_counter()
    size, tokens_in = built.config.page_size, built.slots.tokens_in
    pages = built.memory.num_pages
    most = min(int(tokens_in(pages * size)), built.memory.max_model_len)
    longest = min(most - 1, int(tokens_in(built.config.chunked_prefill_size)))
    on_gpu = built.config.device != "cpu"
    lengths: Iterable[int] = GPU_TOKENS if on_gpu else (int(tokens_in(PAGES * size)) - 1,)
    lengths = sorted({max(1, min(n, longest)) for n in lengths})
    singles = [_one(built, length) for length in lengths]
    if on_gpu:
        singles += _behind_fronts(built, lengths, most - 1)
    rows = min(built.config.max_num_seqs, pages)
    several = [_several(built, count) for count in sorted({1, rows})] if on_gpu else []
    several += _with_guesses(built, most)
    alone = built.runner.sampler.alone
    if on_gpu and alone:
        prefills = [plan for steps in (*singles, *several) for plan in steps.without_decode()]
        compile_ahead(functools.partial(built.runner.rehearse, prefills))
    # First without prefill graphs: steps that fit no graph, or report page selection, run eagerly.
    graphs = built.runner.prefill_graphs
    # Turning graphs off here would leave them on in the other ranks, so several ranks keep them.
    built.runner.prefill_graphs = None if alone else graphs
    for steps in singles:
        _run(built, steps)
    built.runner.prefill_graphs = graphs
    if graphs is not None:
        # Captures the largest graph first: smaller ones reuse its memory.
        built.core.executor.call("prefill_graphs.prepare_next")
    for steps in several:
        _run(built, steps)
    if on_gpu:
        log.info("ran every kernel once in %.1f s", time.perf_counter() - began)
    encoder = built.runner.encoder
    if encoder is not None:
        sides = built.runner.shape.image_sides[: None if on_gpu else 1]
        built.core.executor.call("encoder.rehearse", sides=sides)
    built.core.executor.call("forget_reads")


class _Steps(NamedTuple):
    """Rows open with prefills, the last of which is sampled, decode once, and are closed."""

    prefills: tuple[StepPlan, ...]
    decode: StepPlan
    close: StepPlan

    def without_decode(self) -> tuple[StepPlan, ...]:
        """All but the decode step."""
        return *self.prefills, self.close


def _one(built: Built, length: int) -> _Steps:
    """A prompt of `length` tokens in row 0."""
    return _prompt(built, [0, length])


def _behind_fronts(built: Built, lengths: Sequence[int], most: int) -> list[_Steps]:
    """Steps behind each front of a row, which attention computes in another way."""
    fronts = [int(built.slots.tokens_in(slots)) + 1 for slots in built.runner.front_slots]
    return [steps for past in fronts for steps in _behind(built, past, lengths, most)]


def _behind(built: Built, past: int, lengths: Sequence[int], most: int) -> list[_Steps]:
    """Steps of all lengths, one after the other in row 0, as far as they are of `most` tokens."""
    steps = range(0, past, lengths[-1])
    bounds = [
        *steps,
        *itertools.takewhile(lambda n: n <= most, itertools.accumulate(lengths, initial=past)),
    ]
    return [_prompt(built, bounds)] if bounds[-1] > past else []


def _prompt(built: Built, bounds: Sequence[int]) -> _Steps:
    """A prompt in row 0, cut into steps at these numbers of tokens."""
    prompt = [i % built.spec.vocab_size for i in range(bounds[-1])]
    grant = _granted(built, 0, tuple(range(int(built.slots.pages_for(bounds[-1] + 1)))))
    works = (
        [RowWork(0, a, prompt[a:b], sample=b == bounds[-1])] for a, b in itertools.pairwise(bounds)
    )
    return _steps([_opened(0)], [grant], *works)


def _several(built: Built, count: int) -> _Steps:
    """One token in each of `count` rows, each in a page of its own."""
    rows = range(count)
    prefill = [RowWork(row=row, first=0, tokens=[0], sample=True) for row in rows]
    return _steps(list(map(_opened, rows)), [_granted(built, row, (row,)) for row in rows], prefill)


def _with_guesses(built: Built, most: int) -> list[_Steps]:
    """Steps of one row and of all that guess, as they are behind a prompt of one token; none where
    nobody guesses, or such rows would have more than `most` tokens."""
    asked = built.config.speculation
    if asked is None or 2 + 2 * asked.drafts > most:
        return []
    drafts, ahead = asked.drafts, asked.drafts if built.spec.draft is not None else 0
    pages = int(built.slots.pages_for(2 + 2 * drafts))
    found = []
    for count in sorted({1, min(built.config.max_num_seqs, built.memory.num_pages // pages)}):
        rows = range(count)
        grants = [
            _granted(built, row, tuple(range(row * pages, (row + 1) * pages))) for row in rows
        ]
        prefill = [RowWork(row, 0, [0], sample=True, ahead=ahead) for row in rows]
        guesses = [
            RowWork(row, 1, [0] * (1 + drafts), True, 1, drafts=drafts, ahead=ahead) for row in rows
        ]
        found.append(_steps(list(map(_opened, rows)), grants, prefill, guesses))
    return found


def _steps(
    opened: Sequence[RowOpen], grants: Sequence[PageGrant], *works: Sequence[RowWork]
) -> _Steps:
    """Each of `works` is a step."""
    rows = [work.row for work in works[-1]]
    ends = [work.first + work.num_tokens for work in works[-1]]
    first, *others = (StepPlan(-3, (), (), (), tuple(work)) for work in works)
    first = first._replace(opened=tuple(opened), grants=tuple(grants))
    return _Steps(
        (first, *others),
        StepPlan(-2, (), (), (), (), DecodeWork.of(rows, ends, [1] * len(rows))),
        StepPlan(-1, tuple(rows), (), (), ()),
    )


def _run(built: Built, steps: _Steps) -> None:
    launch = built.core.executor.launch
    *_, last = (launch(plan).result() for plan in steps.prefills)
    for plan in (steps.decode, steps.close):
        launch(plan).result()
    if any(token < 0 for token in last.tokens):
        raise BadModel(
            "the model's logits are NaN or infinite already for a short prompt",
            "Check the weights, or try --dtype float32",
        )


def _granted(built: Built, row: int, pages: tuple[int, ...]) -> PageGrant:
    """The row's first pages: the same numbers in all pools. One that has fewer gives some twice:
    their contents are never read."""
    fewer = built.memory.window_pages
    return PageGrant(row, 0, pages, tuple(page % fewer for page in pages) if fewer else ())


def _opened(row: int) -> RowOpen:
    params = SamplingParams(temperature=0)
    return RowOpen(row=row, request_id=f"warm-up-{row}", params=params, seed=0)
