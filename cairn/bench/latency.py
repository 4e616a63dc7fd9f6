"""`cairn bench latency`: prefill and decode per context length and batch, against the roofline."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cairn.bench.fill import fill_pages
from cairn.bench.overlap import SelectionWatch
from cairn.bench.records import Cell
from cairn.bench.roofline import Roofline, measure
from cairn.bench.session import Phase, Subject, TokenPrompt, open_engine, random_prompts, run_phase
from cairn.bench.timing import kernels
from cairn.config import SMALL_KV_DTYPES
from cairn.errors import CairnError
from cairn.llm import LLM
from cairn.models.registry import measure_weights
from cairn.specs.model import ModelSpec

WARM_UP_TOKENS = 300
"""Tokens of the warm-up prompt: more than a window and several pages, so that every kernel runs."""
COUNTED_STEPS = 4
"""Decode steps whose kernels are counted."""
MAX_PREFILLS, PREFILL_SECONDS = 5, 1.0
"""Most prefills per cell, of which the median is recorded, and seconds after which no further one
is started."""


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """Which cells to measure.

    Attributes:
        subject: folder or shape.
        contexts: prompt lengths in user tokens.
        batches: numbers of sequences.
        steps: decode steps to average over.
        backends: attention kinds.
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


def run_latency(plan: LatencyPlan) -> Iterator[tuple[Cell, Roofline]]:
    """Yield every cell when it is measured, with the roofline measured with its engine."""
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
                    for cell in _Point(plan, llm, backend, context, batch).cells(roofline):
                        yield cell, roofline


@dataclass(frozen=True, slots=True)
class _Ran:
    """A measured phase with its counters."""

    phase: Phase
    peak_bytes: int | None = None
    launches: int | None = None
    union: float | None = None


@dataclass(frozen=True, slots=True)
class _Point:
    """One context length and batch size on an engine."""

    plan: LatencyPlan
    llm: LLM
    backend: str
    context: int
    batch: int

    @property
    def on_gpu(self) -> bool:
        return self.llm.engine_config.device.startswith("cuda")

    def prompts(self, count: int, salt: int) -> list[TokenPrompt]:
        """Prompts that differ from those of other cells, so that no page is a prefix-cache hit."""
        seed = 10_000 * self.context + 10 * self.batch + salt
        return self.plan.subject.prompts(count, self.context, self.llm.spec.vocab_size, seed)

    def cells(self, roofline: Roofline) -> Iterator[Cell]:
        """The prefill cell (without `fill`) and the decode cell.

        The prompts run twice: first to measure prefill, then with their pages in the prefix cache,
        so that decode steps contain all sequences and no prefill.
        """
        prompts = self.prompts(self.batch, salt=0)
        spec, slots = self.llm.spec, _slots(self.llm.spec, self.context)
        union = None
        if self.plan.fill:
            fill_pages(self.llm, prompts)
        else:
            ran = self._prefill(prompts)
            union = ran.union
            floor = roofline.prefill_floor(spec, slots, self.batch)
            tokens = self.batch * self.context
            yield self._cell("prefill", ran, ran.phase.prefill_seconds, floor, tokens)
        ran = self._decode(prompts, union)
        step = ran.phase.decode_seconds * self.batch / ran.phase.decode_tokens
        cached = self.llm.engine_config.kv_cache_dtype
        small = cached if cached in SMALL_KV_DTYPES else None
        floor = roofline.decode_floor(spec, slots + self.plan.steps // 2, self.batch, small)
        yield self._cell("decode", ran, step, floor, self.batch)

    def _prefill(self, prompts: Sequence[TokenPrompt]) -> _Ran:
        union, launches, peak = None, None, None
        if self.on_gpu:
            # Run once before measuring, to compile kernels of these shapes.
            if self.backend == "hsa":
                with SelectionWatch() as watch:
                    run_phase(self.llm, self.prompts(1, salt=1), 1)
                union = watch.union
            launches = self._prefill_launches()
            phase, peak = _with_peak(lambda: run_phase(self.llm, prompts, 1))
        else:
            phase = run_phase(self.llm, prompts, 1)
        phases = [phase]
        for salt in range(4, 3 + MAX_PREFILLS):
            if sum(phase.prefill_seconds for phase in phases) < PREFILL_SECONDS:
                phases.append(run_phase(self.llm, self.prompts(self.batch, salt), 1))
        if len(phases) > 1:
            # Prefill the first prompts again: other phases may have evicted their pages, which the
            # decode cell expects in the prefix cache.
            run_phase(self.llm, prompts, 1)
        phases.sort(key=lambda phase: phase.prefill_seconds)
        return _Ran(phases[len(phases) // 2], peak, launches, union)

    def _prefill_launches(self) -> int:
        """Kernels per prefill step: mean over the last steps of a prompt whose other pages are
        cached."""
        count, steps = 0, 1
        for salt in (2, 3):
            # Count the second run: the first may compile kernels.
            last = self.prompts(1, salt)
            fill_pages(self.llm, last, left=2 * self.llm.engine_config.chunked_prefill_size)
            count, steps = self._kernels(last, 1)
        return round(count / max(1, steps))

    def _decode(self, prompts: Sequence[TokenPrompt], union: float | None) -> _Ran:
        steps = self.plan.steps
        if not self.on_gpu:
            phase = run_phase(self.llm, prompts, steps + 1)
            self._expect_full_batches(phase)
            return _Ran(phase)
        # Run once before measuring, so that CUDA graphs for this batch size are captured.
        run_phase(self.llm, prompts, steps + 1)
        frames = self.llm.engine.runner.pools.frames
        if frames is not None:
            # Empty the frames: the first run has loaded all pages that the second reads.
            frames.forget()
        phase, peak = _with_peak(lambda: run_phase(self.llm, prompts, steps + 1))
        self._expect_full_batches(phase)
        # Both runs start with a prefill of the incomplete last page, which cancels out.
        few, more = (self._kernels(prompts, 2 + n)[0] for n in (0, COUNTED_STEPS))
        return _Ran(phase, peak, round((more - few) / COUNTED_STEPS), union)

    def _expect_full_batches(self, phase: Phase) -> None:
        """Raise CairnError unless every decode step contained all rows, with their prompts cached;
        otherwise the cell's batch size would be wrong."""
        again = phase.prefill_tokens - self.batch * self.llm.engine_config.page_size
        begun = self.batch  # at most one prefill step for each row
        if phase.preemptions or again > 0 or phase.steps > self.plan.steps + begun:
            raise CairnError(
                f"the {self.batch} rows of {self.context} and {self.plan.steps} tokens did not run "
                f"side by side: {phase.steps} steps, {phase.preemptions} preemptions, and "
                f"{phase.prefill_tokens} tokens of prompts that the cache did not hold",
                "Give more --kv-cache-memory or --max-num-seqs, or fewer --batches or --steps",
            )

    def _kernels(self, prompts: Sequence[TokenPrompt], max_tokens: int) -> tuple[int, int]:
        """Number of kernels and steps of a run of the prompts."""
        phases: list[Phase] = []
        count = kernels(lambda: phases.append(run_phase(self.llm, prompts, max_tokens)))
        return count, phases[0].steps

    def _cell(self, phase: str, ran: _Ran, seconds: float, floor: float, tokens: int) -> Cell:
        config, counted = self.llm.engine_config, ran.phase
        return Cell(
            shape=self.plan.subject.name,
            phase=phase,
            context=self.context,
            batch=self.batch,
            backend=self.backend,
            dtype=config.dtype,
            ms=seconds * 1e3,
            floor_ms=floor * 1e3,
            tokens_per_s=tokens / seconds,
            pages_read=_pages_per_query(counted) if phase == "decode" else None,
            host_us=sum(counted.host_us.values()) if counted.host_us else None,
            host_us_by_stage=counted.host_us,
            parameters=measure_weights(self.llm.spec, config.dtype)[0],
            selection=self.plan.subject.selection if self.backend == "hsa" else None,
            union16=ran.union,
            launches=ran.launches,
            peak_bytes=ran.peak_bytes,
            step_tokens=config.chunked_prefill_size,
            kv_cache_dtype=config.kv_cache_dtype,
            frame_hits=counted.frame_hits / read if (read := _sheets_read(counted)) else None,
        )


def _with_peak(work: Callable[[], Phase]) -> tuple[Phase, int]:
    """Result of `work`, and its peak GPU memory beyond the memory allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # Keep the garbage collector from walking millions of prompt tokens during a step.
    gc.collect()
    gc.freeze()
    try:
        phase = work()
    finally:
        gc.unfreeze()
    return phase, torch.cuda.max_memory_allocated() - before


def _slots(spec: ModelSpec, tokens: int) -> int:
    """Number of slots of `tokens` user tokens and their landmarks."""
    if not spec.landmarks or not spec.page_size:
        return tokens
    return tokens + tokens // (spec.page_size - 1)


def _sheets_read(phase: Phase) -> int:
    """Pages of one head that were read through frames."""
    return phase.frame_hits + phase.frame_misses


def _pages_per_query(phase: Phase) -> float | None:
    """Mean number of pages per query and landmark layer; None without such layers."""
    return phase.pages_read / phase.queries if phase.queries else None
