"""`cairn bench latency`: prefill and decode per context length and batch, against the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.bench.fill import fill_pages
from cairn.bench.records import Cell
from cairn.bench.roofline import Roofline, measure
from cairn.bench.session import Phase, Subject, open_engine, random_prompts, run_phase
from cairn.llm import LLM
from cairn.models.spec import ModelSpec
from cairn.models.weight_map import parameter_count

WARM_UP_TOKENS = 300
"""Longer than the windows of small models and a few pages: every kernel has run once after it."""


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """Which cells to measure.

    Attributes:
        subject: folder or shape.
        contexts: prompt lengths in user tokens.
        batches: sequences at once.
        steps: decode steps to average over.
        backends: "hsa", "dense" or both.
        options: keywords of LLM.
        fill: put random pages in the cache instead of running the prefill; decode cells only.
    """

    subject: Subject
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int
    backends: tuple[str, ...]
    options: Mapping[str, Any]
    fill: bool = False


def run_latency(
    plan: LatencyPlan, report: Callable[[Cell], None] = lambda _: None
) -> tuple[list[Cell], Roofline]:
    """Measure every cell and, with each engine, the roofline of its dtype.

    Args:
        plan: what to measure.
        report: called with each cell as soon as it is measured.

    Returns:
        The cells, and the roofline measured with the last engine.
    """
    cells: list[Cell] = []
    roofline: Roofline | None = None
    for backend in plan.backends:
        options = {"max_num_seqs": max(plan.batches)} | dict(plan.options)
        longest = max(*plan.contexts, WARM_UP_TOKENS)
        options.setdefault("max_model_len", longest + plan.steps + 1)
        with open_engine(plan.subject, backend, options) as llm:
            config = llm.engine_config
            roofline = measure(config.dtype, config.device)
            run_phase(llm, random_prompts(1, WARM_UP_TOKENS, llm.spec.vocab_size, seed=1), 2)
            for context in plan.contexts:
                for batch in plan.batches:
                    for cell in _cells(llm, plan, backend, (context, batch), roofline):
                        cells.append(cell)
                        report(cell)
    if roofline is None:
        raise ValueError("a latency plan names at least one backend")
    return cells, roofline


def _cells(
    llm: LLM, plan: LatencyPlan, backend: str, point: tuple[int, int], roofline: Roofline
) -> Iterator[Cell]:
    """The prefill cell and the decode cell of one (context, batch).

    The prompts run twice: first for the prefill alone, then with their pages in the prefix cache,
    so that decode steps hold all sequences and no prefill.
    """
    context, batch = point
    # A prompt that an earlier cell left in the cache would not be prefilled again.
    prompts = random_prompts(batch, context, llm.spec.vocab_size, seed=1000 * context + batch)
    prefill = None
    on_gpu = llm.engine_config.device.startswith("cuda")
    if plan.fill:
        fill_pages(llm, prompts)
    else:
        if on_gpu:
            # Kernels of these shapes are compiled now, not in what is measured.
            others = random_prompts(batch, context, llm.spec.vocab_size, seed=1000 * context + 999)
            run_phase(llm, others, 1)
        prefill = run_phase(llm, prompts, 1)
    if on_gpu:
        # Graphs of these numbers of rows are captured now.
        run_phase(llm, prompts, plan.steps + 1)
    decode = run_phase(llm, prompts, plan.steps + 1)
    slots = _slots(llm.spec, context)

    def cell(phase: str, seconds: float, floor: float, tokens: float, counted: Phase) -> Cell:
        return Cell(
            shape=plan.subject.name,
            phase=phase,
            context=context,
            batch=batch,
            backend=backend,
            dtype=llm.engine_config.dtype,
            ms=seconds * 1e3,
            floor_ms=floor * 1e3,
            tokens_per_s=tokens / seconds,
            pages_read=_pages_per_query(counted) if phase == "decode" else None,
            host_ms=counted.host_seconds / max(1, counted.steps) * 1e3,
            parameters=parameter_count(llm.spec),
        )

    if prefill is not None:
        floor = roofline.prefill_floor(llm.spec, slots, batch)
        yield cell("prefill", prefill.prefill_seconds, floor, batch * context, prefill)
    step = decode.decode_seconds * batch / decode.decode_tokens
    floor = roofline.decode_floor(llm.spec, slots + plan.steps // 2, batch)
    yield cell("decode", step, floor, batch, decode)


def _slots(spec: ModelSpec, tokens: int) -> int:
    """Slots that `tokens` user tokens take with their landmarks."""
    if not spec.landmarks or not spec.page_size:
        return tokens
    return tokens + tokens // (spec.page_size - 1)


def _pages_per_query(phase: Phase) -> float | None:
    """Mean pages that a query read in one landmark layer; None without such layers."""
    return phase.pages_read / phase.queries if phase.queries else None
