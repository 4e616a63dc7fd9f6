"""StepPlan -> StepResult: lays the rows out, runs the model, samples. No policy."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cairn.attention.base import AttentionLayer, Batch, Counters
from cairn.attention.registry import assign
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools
from cairn.runner.graphs import DecodeGraphs, Place
from cairn.runner.rows import Ints, Layout, Rows
from cairn.runner.sampler import Sampler, alternatives
from cairn.runner.selection import selections
from cairn.runner.step import PromptLogprobs, RowWork, Sampled, StepPlan, StepResult

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
    """

    num_rows: int
    max_pages: int
    vocab_size: int
    slots: SlotMap


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
        self.rows = Rows(shape.num_rows, shape.max_pages, shape.slots, shape.vocab_size, device)
        self.sampler = Sampler(shape.vocab_size, device)
        self.counters = Counters()
        self.reads = PageReads(tuple(layer for layer in layers if layer.backend == "hsa"))
        self.graphs: DecodeGraphs | None = None
        if pools.spare_page is not None:
            size = shape.slots.page_size
            place = Place(self.backends, self.rows.page_table, size, pools.spare_page)
            self.graphs = DecodeGraphs(model, place, shape.num_rows)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. The plan's pages must be granted and its rows open."""
        for row in plan.closed:
            self.sampler.close(row)
        for opened in plan.opened:
            self.sampler.open(opened)
        if not plan.work:
            return StepResult(plan.step_id, ())
        layout = self.rows.lay_out(plan)
        if log.isEnabledFor(logging.DEBUG):
            rows = [work.row for work in plan.work]
            log.debug("step %d: rows %s, %d slots", plan.step_id, rows, len(layout.slot))
        began = time.perf_counter()
        works = [work for work in plan.work if work.sample]
        last = self._last(plan, layout)
        logits = self._replayed(plan, layout, last)
        prompt: tuple[PromptLogprobs, ...] = ()
        if logits is None:
            sampled, prompt = self._run(plan, layout, works, last)
        else:
            sampled = self.sampler.sample(logits, works)
        for choice in sampled:
            self.rows.remember(choice.row, choice.token)
        seconds = time.perf_counter() - began
        self.reads.add(layout.slot, self.shape.slots.page_size)
        return StepResult(plan.step_id, sampled, prompt, seconds)

    def _run(
        self, plan: StepPlan, layout: Layout, works: list[RowWork], last: Ints
    ) -> tuple[tuple[Sampled, ...], tuple[PromptLogprobs, ...]]:
        """Run a step of any kind, operation by operation."""
        batch = self.rows.batch(layout, self.backends, self.counters)
        watching = [self.sampler.params(work.row).selection for work in works]
        if any(watching):
            batch.watch = torch.as_tensor(last[watching], device=batch.slot.device)
        hidden = self.model(batch)
        sampled: tuple[Sampled, ...] = ()
        if works:
            index = torch.as_tensor(last, device=hidden.device)
            sampled = self.sampler.sample(self.model.logits(hidden[index]), works)
        if any(watching):
            reads = iter(selections(batch.reads, sum(watching)))
            sampled = tuple(
                replace(one, selection=next(reads)) if watched else one
                for one, watched in zip(sampled, watching, strict=True)
            )
        prompt = tuple(
            self._prompt_logprobs(hidden, work, int(layout.start[i]))
            for i, work in enumerate(plan.work)
            if len(work.prompt_targets)
        )
        return sampled, prompt

    def _replayed(self, plan: StepPlan, layout: Layout, last: Ints) -> Tensor | None:
        """The logits of a plain decode step, from its graph; None where it needs more than that."""
        if self.graphs is None:
            return None
        for work in plan.work:
            if work.tokens is not None or self.sampler.params(work.row).selection:
                return None
        logits = self.graphs.logits(layout, last)
        if logits is not None:
            self._count_replayed(layout.slot)
        return logits

    def _count_replayed(self, slot: Ints) -> None:
        """A graph counts nothing: every query selects as many candidates as it has, up to topk."""
        size = self.shape.slots.page_size
        for layer in self.reads.layers:
            rule = layer.landmark
            assert rule is not None
            candidates = np.maximum(slot - rule.window + 1, 0) // size
            selected = int(np.minimum(candidates, rule.topk).sum()) * layer.num_kv_heads
            self.counters.queries += len(slot)
            self.counters.selected = self.counters.selected + selected

    def _last(self, plan: StepPlan, layout: Layout) -> Ints:
        """Index in the batch of the last user token of every work that asks for one."""
        found = [
            self._index(work, int(start))
            for work, start in zip(plan.work, layout.start, strict=True)
            if work.sample
        ]
        return np.array(found, dtype=np.int64)

    def _index(self, work: RowWork, start: int) -> int:
        """Index in the batch of a work's last user token; `start` is that of its first slot.

        A landmark may follow it in the batch: its logits are never looked at.
        """
        slots = self.shape.slots
        last = slots.slot_of(work.first + work.count - 1)
        return start + last - slots.slots_for(work.first)

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
            rows = torch.as_tensor(index[at : at + block], device=hidden.device)
            logprobs = torch.log_softmax(self.model.logits(hidden[rows]), dim=-1)
            targets = work.prompt_targets[at : at + block]
            entries += [
                alternatives(line, int(target), wanted)
                for line, target in zip(logprobs, targets, strict=True)
            ]
        return PromptLogprobs(work.row, work.first, tuple(entries))
