"""Hierarchical sparse attention: a local window, and a few pages selected by their landmarks.

One layer, for a query at slot s (the mathematics is HiLS-Attention's):

1. the step's keys and values are written to their pages;
2. every page whose last slot runs in this step gets its summary, stored by page id;
3. the window gives its output and its log-sum-exp;
4. the summaries of all pages left of the window are scored, and each KV head selects the best, or
   all in short rows;
5. one softmax over the selected pages' scores, the window's log-sum-exp and (softmax1) a zero
   weighs the pages' own attention outputs against the window's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import GqaBackend, LayerReads, StepPlan
from cairn.attention.batch import Batch, StepRows
from cairn.attention.cuts import ROUND, Cuts, Front, Part
from cairn.attention.framed_pages import FramedStep, attend_framed
from cairn.attention.inputs import HilsInputs
from cairn.cache.pools import CachePools
from cairn.cache.schema import LayerSchema, PageField, PageFormat
from cairn.ops import planning
from cairn.specs.backends import HSA
from cairn.specs.hils import HilsSpec

SUMMARY_KEY, SUMMARY_BIAS = "summary_key", "summary_bias"
WINDOW_KV = "window_k", "window_v"
"""Fields of window pages, where complete pages are in host memory."""


@dataclass(slots=True)
class HsaPlan(StepPlan):
    """A step of landmark layers.

    Attributes:
        framed: what layers share whose pages are in host memory; None: all pages are on the device.
    """

    framed: FramedStep | None = None


class HsaBackend(GqaBackend):
    """Landmark selection over the paged cache; needs page_size == the model's chunk size."""

    name: ClassVar[str] = HSA

    def __init__(self, pools: CachePools, layers: Mapping[int, HilsSpec]) -> None:
        super().__init__(pools, layers)
        if pools.frames is not None:
            window = zip(*(self.caches(layer) for layer in pools.frames.layers), strict=True)
            window_k, window_v = (_addresses(caches) for caches in window)
            host_k, host_v = (_addresses(caches) for caches in pools.frames.host.values())
            self._addresses = (window_k, window_v), (host_k, host_v)

    @classmethod
    def needs(cls, spec: HilsSpec, form: PageFormat) -> LayerSchema:
        """Keys, values and a summary.

        A landmark's own key is read from the cache. If keys are in host memory, or are quantized
        (summaries are not), it is stored a second time as a summary.
        """
        fields = list(form.keys_and_values(spec.num_kv_heads, spec.head_dim))
        if form.in_host:
            named = zip(WINDOW_KV, fields, strict=True)
            window = [replace(f, name=name, window=spec.local_window) for name, f in named]
            fields = [replace(entry, selected=spec.topk) for entry in fields] + window
        if spec.summary != "landmark" or form.kv is not None or form.in_host:
            shape = spec.summary_heads, spec.head_dim
            fields.append(PageField(SUMMARY_KEY, shape, form.dtype, summary=True))
        if spec.bias_by_entropy:
            fields.append(PageField(SUMMARY_BIAS, (spec.num_heads,), torch.float32, summary=True))
        return LayerSchema(tuple(fields))

    @classmethod
    def most_pages(cls, spec: HilsSpec) -> int | None:
        """Those that a program can select from."""
        return planning.most_pages(spec.num_heads, spec.num_kv_heads, spec.topk)

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> HsaPlan:
        """See the base."""
        plan = HsaPlan(batch, cuts, rows, None if rows is None else rows.segments)
        frames = self.pools.frames
        if frames is not None:
            first, groups = frames.layers[0], self.pools.schema.group_of
            place, table = self.place(first, plan), batch.places[groups[first]["k"]].page_table
            completed = place.location[batch.completed] // self.pools.schema.page_size
            plan.framed = FramedStep(frames, batch, place, table, completed)
        return plan

    def fronts(self) -> tuple[Front, ...]:
        """The first slots of a row: in them every layer selects every page left of its window."""
        size = self.pools.schema.page_size
        early = min(
            planning.short_pages(size, s.local_window, s.topk) for s in self.layers.values()
        )
        return (Front(early * size // ROUND * ROUND, early),) if early else ()

    def written(self, layer: int) -> tuple[str, str]:
        """Fields of window pages, if complete pages are in host memory."""
        return super().written(layer) if self.pools.frames is None else WINDOW_KV

    def kv_target(self, layer: int, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor] | None:
        """None where landmarks' own keys are also stored as summaries: `run` needs them."""
        spec = self.layers[layer]
        if spec.summary == "landmark" and SUMMARY_KEY in self.pools.pages[layer]:
            return None
        return super().kv_target(layer, plan)

    def run(self, layer: int, inputs: HilsInputs, plan: HsaPlan) -> Tensor:
        """Attend by landmarks: -> [T, h_q, d] in q's dtype."""
        spec, batch, q, lmk_q = self.layers[layer], plan.batch, inputs.q, inputs.lmk_q
        k_cache, v_cache = self.write(layer, inputs, plan)
        place, fields = self.place(layer, plan), self.pools.pages[layer]
        if plan.framed is not None:
            return self._run_framed(layer, inputs, plan, plan.framed)
        # landmark_attention stores summaries for steps of few slots: no launch of its own.
        few = self._few(spec, inputs, plan) and self._pools_itself(spec, inputs)
        tiled = self._tiled(spec, inputs, plan)
        if batch.completed.numel() and not few:
            self._summarise(layer, inputs, batch)
        candidates = max(0, (batch.max_slot - spec.local_window + 1) // k_cache.shape[2])
        # On a GPU kernels are compiled for each topk, so there is only one.
        topk = spec.topk if q.is_cuda else max(1, min(spec.topk, candidates))
        key_pool = fields.get(SUMMARY_KEY)

        def attend(part: Part) -> Tensor:
            # The op derives from the width of the page table how short rows are: with few pages it
            # does not score them.
            page_table = place.page_table[:, : part.pages]
            o, indices, scores, lse = ops.landmark_attention(
                part.of(q),
                part.of(lmk_q),
                k_cache,
                v_cache,
                k_cache[:, :, -1] if key_pool is None else key_pool,
                fields.get(SUMMARY_BIAS),
                part.row,
                part.slot,
                page_table,
                spec.local_window,
                topk,
                spec.softmax1,
                strategy=spec.strategy,
                store_summaries=few,
                chunked=part.chunked,
            )
            self._watched(layer, plan, indices, scores, lse)
            return o

        return plan.attend(attend, tiled=tiled, by_fronts=True)

    def _tiled(self, spec: HilsSpec, inputs: HilsInputs, plan: StepPlan) -> bool:
        """Whether the step's queries are attended in tiles."""
        lines = planning.LANDMARK_LINES
        return planning.in_tiles(inputs.q, spec.num_kv_heads, plan.cuts.chunked, lines)

    def _few(self, spec: HilsSpec, inputs: HilsInputs, plan: StepPlan) -> bool:
        """Whether no query can select a page that the step completes, and a GPU attends them one
        by one."""
        q = inputs.q
        return q.is_cuda and len(q) <= spec.local_window and not self._tiled(spec, inputs, plan)

    @staticmethod
    def _pools_itself(spec: HilsSpec, inputs: HilsInputs) -> bool:
        """Whether a landmark's own query pools its page."""
        return inputs.summary_query is None and spec.summary == "prior" and not spec.group_query

    def _watched(
        self, layer: int, plan: StepPlan, indices: Tensor, scores: Tensor, lse: Tensor
    ) -> None:
        """Record the reads of the watched queries."""
        at = plan.batch.watch
        if at is not None:
            softmax1 = self.layers[layer].softmax1
            weights, window_weight = planning.shared_weights(scores[at], lse[at], softmax1)
            plan.reads.append(LayerReads(layer, indices[at], weights, window_weight))

    def _run_framed(
        self, layer: int, inputs: HilsInputs, plan: HsaPlan, step: FramedStep
    ) -> Tensor:
        """`run` for pages in host memory; the step's keys and values are in window pages."""
        spec, fields, window = self.layers[layer], self.pools.pages[layer], self.caches(layer)
        summaries, layers = (fields[SUMMARY_KEY], fields.get(SUMMARY_BIAS)), step.frames.layers
        few = self._few(spec, inputs, plan) and len(inputs.q) * spec.topk <= step.frames.count
        own = few and self._pools_itself(spec, inputs)
        if plan.batch.completed.numel() and not own:
            step.store(window, layers.index(layer))
            self._summarise(layer, inputs, plan.batch)
        if not few:
            return attend_framed(spec, layer, inputs, window, summaries, step, plan)
        found = step.attend(spec, layers.index(layer), inputs, window, summaries, own)
        if layer == layers[-1]:
            step.finish(*self._addresses)
        self._watched(layer, plan, *found[1:])
        return found[0]

    def _summarise(self, layer: int, inputs: HilsInputs, batch: Batch) -> None:
        """Store key and bias of the pages that this step completes."""
        spec, fields = self.layers[layer], self.pools.pages[layer]
        k_cache, pages = fields["k"], batch.completed_pages
        key_pool, bias_pool = fields.get(SUMMARY_KEY), fields.get(SUMMARY_BIAS)
        query = inputs.summary_query
        if query is None and spec.needs_summary_query:
            query = inputs.lmk_q[batch.completed]
        own_key = spec.summary == "prior" and not spec.group_query
        if query is not None:
            ops.store_prior_summary(query, k_cache, pages, key_pool if own_key else None, bias_pool)
        if key_pool is None or own_key:
            return
        # Padding is -1, which becomes the last page: in graphs that is the spare page.
        pages = pages % len(k_cache)
        if spec.summary == "landmark":
            assert inputs.k is not None
            key_pool[pages] = inputs.k[batch.completed]
        elif spec.summary == "mean":
            key_pool[pages] = ops.mean_summary(k_cache, pages).to(key_pool.dtype)
        elif spec.group_query and query is not None:
            group = query.unflatten(1, (spec.num_kv_heads, -1)).float().mean(2).to(query.dtype)
            key_pool[pages] = ops.prior_summary(group, k_cache, pages)[0]


def _addresses(layers: Iterable[Tensor]) -> Tensor:
    """[layers] uint64, addresses of the caches of layers, for `ops.transfer_kv_all_layer`."""
    caches = list(layers)
    numbers = [cache.data_ptr() for cache in caches]
    return torch.tensor(numbers, dtype=torch.int64, device=caches[0].device).view(torch.uint64)
