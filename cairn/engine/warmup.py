"""First prefills and decodes, so that no user waits for what happens only once.

On a GPU kernels are compiled when they first run, once for every way of cutting the work that the
number of tokens asks for, and graphs are captured; never for a length. So steps of few and of many
tokens run here, all graphs of prefills are captured, and one decode step of each graph's size runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from cairn.engine.build import Built
from cairn.errors import BadModel
from cairn.runner.step import DecodeWork, PageGrant, RowOpen, RowWork, StepPlan
from cairn.types import SamplingParams

log = logging.getLogger(__name__)

PAGES = 3
"""Length of the warm-up prompt: complete pages, and a decode that reads them."""
GPU_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 1024)
"""Lengths of the prompts on a GPU: what is a power of two by number of tokens meets each there."""


def warm_up(built: Built) -> None:
    """Run steps past the scheduler: its pages, counts and draws stay untouched.

    Raises:
        BadModel: the model's logits are not numbers.
    """
    began = time.perf_counter()
    size, tokens_in = built.config.page_size, built.slots.tokens_in
    pages = min(built.memory.num_pages, built.memory.window_pages or built.memory.num_pages)
    most = min(int(tokens_in(pages * size)), built.memory.max_model_len)
    longest = min(most - 1, int(tokens_in(built.config.chunked_prefill_size)))
    on_gpu = built.config.device != "cpu"
    lengths: Iterable[int] = GPU_TOKENS if on_gpu else (int(tokens_in(PAGES * size)) - 1,)
    # First without graphs of prefills: what fits none, or is looked at, runs so later.
    graphs, built.runner.prefill_graphs = built.runner.prefill_graphs, None
    for length in sorted({max(1, min(n, longest)) for n in lengths}):
        _run_one(built, length)
    if graphs is not None:
        for kind in graphs.kinds():
            graphs.prepare(kind)
    built.runner.prefill_graphs = graphs
    if built.runner.graphs is not None:
        rows = min(built.config.max_num_seqs, pages)
        for count in sorted({min(bucket, rows) for bucket in built.runner.graphs.buckets}):
            _run_rows(built, count)
    if on_gpu:
        log.info("ran every kernel once in %.1f s", time.perf_counter() - began)
    built.runner.forget_reads()


def _run_one(built: Built, length: int) -> None:
    """Prefill and decode a prompt of `length` tokens in row 0."""
    pages = int(built.slots.pages_for(length + 1))
    prompt = [i % built.spec.vocab_size for i in range(length)]
    grant = _granted(built, 0, tuple(range(pages)))
    prefill = RowWork(row=0, first=0, tokens=prompt, sample=True)
    decode = DecodeWork.of([0], [length], [1])
    launch = built.core.executor.launch
    first = launch(StepPlan(-3, (), (_opened(0),), (grant,), (prefill,))).result()
    launch(StepPlan(-2, (), (), (), (), decode)).result()
    launch(StepPlan(-1, (0,), (), (), ())).result()
    if first.tokens[0] < 0:
        raise BadModel(
            "the model's logits are NaN or infinite already for a short prompt",
            "Check the weights, or try --dtype float32",
        )


def _run_rows(built: Built, count: int) -> None:
    """Prefill one token in each of `count` rows, each in a page of its own, then decode them."""
    rows = range(count)
    grants = tuple(_granted(built, row, (row,)) for row in rows)
    prefill = tuple(RowWork(row=row, first=0, tokens=[0], sample=True) for row in rows)
    decode = DecodeWork.of(rows, [1] * count, [1] * count)
    launch = built.core.executor.launch
    launch(StepPlan(-3, (), tuple(map(_opened, rows)), grants, prefill)).result()
    launch(StepPlan(-2, (), (), (), (), decode)).result()
    launch(StepPlan(-1, tuple(rows), (), (), ())).result()


def _granted(built: Built, row: int, pages: tuple[int, ...]) -> PageGrant:
    """The row's first pages: the same numbers in all pools."""
    return PageGrant(row, 0, pages, pages if built.memory.window_pages else ())


def _opened(row: int) -> RowOpen:
    params = SamplingParams(temperature=0)
    return RowOpen(row=row, request_id=f"warm-up-{row}", params=params, seed=0)
