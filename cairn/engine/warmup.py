"""Warm-up: runs steps of every kind before the first request, so that kernels are compiled.

On a GPU the smallest and the largest graphs are captured. The engine captures the others while it
is idle, or when a step needs one.
"""

from __future__ import annotations

import functools
import logging
import time

from cairn.engine.build import Built, page_format
from cairn.errors import BadModel
from cairn.ops.compile_ahead import compile_ahead
from cairn.ops.compile_cache import cache_path
from cairn.runner.first_steps import FirstSteps, StepSeries

log = logging.getLogger(__name__)


def warm_up(built: Built) -> None:
    """Run steps without the scheduler: its pages, counts and draws are not touched.

    Raises:
        BadModel: the model's logits are not numbers.
    """
    began = time.perf_counter()
    runner, on_gpu = built.runner, built.config.device != "cpu"
    first = first_steps(built)
    prompts = first.prompts(on_gpu)
    several = (first.rows() if on_gpu else []) + first.guesses()
    alone = runner.sampler.alone
    if on_gpu and alone and built.config.kv_cache_memory is not None:
        # Otherwise they were compiled when steps were measured.
        plans = [plan for steps in (*prompts, *several) for plan in steps.without_decode()]
        marker = cache_path(
            (built.spec, page_format(built.config), first, runner.graphs is not None),
            runner.rows.device,
        )
        compile_ahead(functools.partial(runner.rehearse, plans), marker=marker)
    # First without prefill graphs: steps that fit no graph, or report page selection, run eagerly.
    graphs = runner.prefill_graphs
    # Turning graphs off here would leave them on in the other ranks, so several ranks keep them.
    runner.prefill_graphs = None if alone else graphs
    for steps in prompts:
        _run(built, steps)
    runner.prefill_graphs = graphs
    if graphs is not None:
        # Captures the largest graph first: smaller ones reuse its memory.
        built.core.executor.call("prefill_graphs.prepare_next")
    for steps in several:
        _run(built, steps)
    if on_gpu:
        log.info("ran every kernel once in %.1f s", time.perf_counter() - began)
    if runner.encoder is not None:
        sides = runner.shape.image_sides[: None if on_gpu else 1]
        built.core.executor.call("encoder.rehearse", sides=sides)
    built.core.executor.call("forget_reads")


def first_steps(built: Built) -> FirstSteps:
    """The steps of an engine's warm-up."""
    memory, tokens_in = built.memory, built.slots.tokens_in
    return FirstSteps(
        built.runner.shape,
        memory.num_pages,
        memory.window_pages,
        min(int(tokens_in(memory.num_pages * built.config.page_size)), memory.max_model_len),
        int(tokens_in(built.config.chunked_prefill_size)),
        built.runner.front_slots,
        built.spec.draft is not None,
    )


def _run(built: Built, steps: StepSeries) -> None:
    launch = built.core.executor.launch
    *_, last = (launch(plan).result() for plan in steps.prefills)
    for plan in (steps.decode, steps.close):
        launch(plan).result()
    if any(token < 0 for token in last.tokens):
        raise BadModel(
            "the model's logits are NaN or infinite already for a short prompt",
            "Check the weights, or try --dtype float32",
        )
