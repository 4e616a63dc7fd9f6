"""StepPlan -> StepResult: lays the rows out, runs the model, samples. No policy.

On a GPU a step is only queued here; its tokens go to the next one on the device, and the host
waits for them when it asks for the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cairn.attention.base import AttentionLayer, Batch, Counters
from cairn.attention.registry import assign
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools
from cairn.runner.graphs import DecodeGraphs, Ending, Place, Sampling
from cairn.runner.rows import Ints, Layout, Rows
from cairn.runner.sampler import Choice, Sampler, alternatives
from cairn.runner.selection import selections
from cairn.runner.staging import Arriving, send
from cairn.runner.step import (
    Launched,
    PromptLogprobs,
    Ready,
    RowWork,
    StepPlan,
    StepResult,
)
from cairn.types import LayerSelection

log = logging.getLogger(__name__)

LOGITS_BYTES = 64 << 20
"""Prompt log-probabilities are taken in blocks of at most this many bytes of logits."""


class StepModel(Protocol):
    """What the runner needs of a model."""

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] of every slot of the batch."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, V] float32 over the user vocabulary."""


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """Sizes that stay for the runner's life.

    Attributes:
        num_rows: requests that run at once.
        max_pages: pages of the longest sequence.
        vocab_size: user vocabulary; the landmark id is the first one after it.
        slots: slot and landmark arithmetic.
        windowed: some layers have pages of their own.
    """

    num_rows: int
    max_pages: int
    vocab_size: int
    slots: SlotMap
    windowed: bool = False


@dataclass(slots=True)
class PageReads:
    """Pages that windows touch and that rows hold, summed over queries and landmark layers.

    Attributes:
        layers: the landmark layers.
        window: pages under the windows.
        held: pages that dense attention would read.
    """

    layers: tuple[AttentionLayer, ...]
    window: int = 0
    held: int = 0

    def add(self, slot: Ints, page_size: int) -> None:
        """Count the queries at `slot` [T]."""
        page = slot // page_size
        held = int(page.sum()) + len(page)
        for width in {layer.landmark.window for layer in self.layers if layer.landmark}:
            layers = sum(1 for la in self.layers if la.landmark and la.landmark.window == width)
            outside = np.maximum((slot - width + 1) // page_size, 0)
            self.window += layers * (held - int(outside.sum()))
            self.held += layers * held


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What a step chose: the tokens, and what the queries of some works read."""

    choice: Choice
    selection: Mapping[int, tuple[LayerSelection, ...]] = field(default_factory=dict)
    prompt: tuple[PromptLogprobs, ...] = ()


class LaunchedStep:
    """A step on its way, which has taken the host `seconds` in the model so far."""

    def __init__(self, plan: StepPlan, chosen: _Chosen, seconds: float) -> None:
        self._plan = plan
        self._chosen = chosen
        self._seconds = seconds
        self._tokens = Arriving(chosen.choice.tokens)

    def result(self) -> StepResult:
        """Wait for the tokens."""
        began = time.perf_counter()
        tokens = self._tokens.tokens()
        seconds = self._seconds + time.perf_counter() - began
        chosen = self._chosen
        return StepResult(
            self._plan.step_id,
            tokens,
            chosen.choice.logprobs,
            chosen.selection,
            chosen.prompt,
            seconds,
        )


class Runner:
    """Owns the model, the pools and the rows on one device."""

    def __init__(
        self,
        model: StepModel,
        layers: tuple[AttentionLayer, ...],
        pools: CachePools,
        shape: RunnerShape,
        device: torch.device,
    ) -> None:
        self.model = model
        self.pools = pools
        self.shape = shape
        self.backends = assign(layers, pools)
        sizes = (shape.num_rows, shape.max_pages, shape.slots, shape.vocab_size)
        self.rows = Rows(*sizes, device, shape.windowed)
        self.sampler = Sampler(shape.vocab_size, shape.num_rows, device)
        self.counters = Counters()
        self.reads = PageReads(tuple(layer for layer in layers if layer.backend == "hsa"))
        # (window, topk) -> KV heads of all layers that select so.
        self._kv_heads: dict[tuple[int, int], int] = {}
        for layer in self.reads.layers:
            if (rule := layer.landmark) is not None:
                key = rule.window, rule.topk
                self._kv_heads[key] = self._kv_heads.get(key, 0) + layer.num_kv_heads
        self.graphs: DecodeGraphs | None = None
        if pools.spare_page is not None:
            size = shape.slots.page_size
            table, last_token = self.rows.page_table, self.rows.last_token
            own = self.rows.window_table, pools.window_pages
            place = Place(self.backends, table, last_token, size, pools.spare_page, *own)
            self.graphs = DecodeGraphs(model, place, shape.num_rows)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start one step. The plan's pages must be granted and its rows open."""
        for row in plan.closed:
            self.sampler.close(row)
        for opened in plan.opened:
            self.sampler.open(opened)
        if not plan.work:
            return Ready(StepResult(plan.step_id, ()))
        layout = self.rows.lay_out(plan)
        if log.isEnabledFor(logging.DEBUG):
            rows = [work.row for work in plan.work]
            log.debug("step %d: rows %s, %d slots", plan.step_id, rows, len(layout.slot))
        works = [work for work in plan.work if work.sample]
        last = layout.last[[work.sample for work in plan.work]]
        self.reads.add(layout.slot, self.shape.slots.page_size)
        chosen = self._replayed(plan, layout, works, last)
        seconds = 0.0
        if chosen is None:
            began = time.perf_counter()
            chosen = self._run(plan, layout, works, last)
            seconds = time.perf_counter() - began
        return LaunchedStep(plan, chosen, seconds)

    def _run(self, plan: StepPlan, layout: Layout, works: list[RowWork], last: Ints) -> _Chosen:
        """Run a step of any kind, operation by operation."""
        batch = self.rows.batch(layout, self.backends, self.counters)
        watched = [i for i, w in enumerate(works) if self.sampler.params(w.row).selection]
        if watched:
            batch.watch = torch.as_tensor(last[watched], device=batch.slot.device)
        hidden = self.model(batch)
        choice = Choice(hidden.new_empty(0, dtype=torch.int64), {})
        if works:
            numbers = last, np.array([work.row for work in works], dtype=np.int64)
            index, row = send(numbers, hidden.device)
            choice = self.sampler.sample(self.model.logits(hidden[index]), works)
            self.rows.remember(row, choice.tokens)
        reads = selections(batch.reads, len(watched)) if watched else []
        prompt = tuple(
            self._prompt_logprobs(hidden, work, int(layout.start[i]))
            for i, work in enumerate(plan.work)
            if len(work.prompt_targets)
        )
        return _Chosen(choice, dict(zip(watched, reads, strict=True)), prompt)

    def _replayed(
        self, plan: StepPlan, layout: Layout, works: list[RowWork], last: Ints
    ) -> _Chosen | None:
        """Run a plain decode step by its graph; None where it needs more than that."""
        if self.graphs is None:
            return None
        for work in plan.work:
            if work.tokens is not None or self.sampler.params(work.row).selection:
                return None
        row = np.array([work.row for work in works], dtype=np.int64)
        sampling = Sampling(last, row, Ending.LOGITS, None)
        if self.sampler.plain(works):
            draws = self.sampler.draws(works)
            sampling = Sampling(last, row, Ending.DRAW if draws else Ending.GREEDY, draws)
        output = self.graphs.run(layout, sampling)
        if output is None:
            return None
        self._count_replayed(layout.slot)
        if sampling.ending is not Ending.LOGITS:
            return _Chosen(Choice(output, {}))
        choice = self.sampler.sample(output, works)
        (index,) = send((row,), output.device)
        self.rows.remember(index, choice.tokens)
        return _Chosen(choice)

    def _count_replayed(self, slot: Ints) -> None:
        """A graph counts nothing: every query selects as many candidates as it has, up to topk."""
        size = self.shape.slots.page_size
        for (window, topk), heads in self._kv_heads.items():
            candidates = np.maximum(slot - window + 1, 0) // size
            self.counters.replayed += int(np.minimum(candidates, topk).sum()) * heads
        self.counters.queries += len(slot) * len(self.reads.layers)

    def _prompt_logprobs(self, hidden: Tensor, work: RowWork, start: int) -> PromptLogprobs:
        """Log-probabilities of the work's targets, a block of logits at a time."""
        wanted = self.sampler.params(work.row).prompt_logprobs
        assert wanted is not None
        offsets = np.arange(len(work.prompt_targets))
        slots = self.shape.slots
        index = start + slots.slot_of(work.first + offsets) - slots.slots_for(work.first)
        block = max(1, LOGITS_BYTES // (4 * self.shape.vocab_size))
        entries = []
        for at in range(0, len(index), block):
            (rows,) = send((index[at : at + block],), hidden.device)
            logprobs = torch.log_softmax(self.model.logits(hidden[rows]), dim=-1)
            targets = work.prompt_targets[at : at + block]
            entries += [
                alternatives(line, int(target), wanted)
                for line, target in zip(logprobs, targets, strict=True)
            ]
        return PromptLogprobs(work.row, work.first, tuple(entries))
