"""Hierarchical sparse attention: a local window, and a few pages found by their landmarks.

One layer, for a query at slot s (the mathematics is HiLS-Attention's):

1. the step's keys and values are written to their pages;
2. every page whose last slot runs in this step gets its summary, stored by page id;
3. the window gives its output and its log-sum-exp;
4. the summaries of all pages left of the window are scored, and each KV head keeps the best, or
   all where a row is still so short;
5. one softmax over the selected pages' scores, the window's log-sum-exp and (softmax1) a zero
   weighs the pages' own attention outputs against the window's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import GqaBackend, LayerReads, StepPlan
from cairn.attention.batch import Batch, StepRows
from cairn.attention.cuts import ROUND, Cuts, Front, Part
from cairn.attention.framed_pages import FramedPages, Pair, attend_framed, stored_sheets
from cairn.attention.inputs import HilsInputs
from cairn.cache.schema import LayerSchema, PageField, PageFormat
from cairn.ops import advice
from cairn.specs.backends import HSA
from cairn.specs.hils import HilsSpec

SUMMARY_KEY, SUMMARY_BIAS = "summary_key", "summary_bias"
NEAR = "near_k", "near_v"
"""Keys and values under the window, where all others lie in host memory."""


@dataclass(slots=True)
class HsaPlan(StepPlan):
    """A step of layers whose pages may lie in host memory.

    Attributes:
        stored: KV heads of a layer -> the sheets that it stores there, see `stored_sheets`.
    """

    stored: dict[int, Pair] = field(default_factory=dict)


class HsaBackend(GqaBackend):
    """Landmark selection over the paged cache; needs page_size == the model's chunk size."""

    name: ClassVar[str] = HSA

    @classmethod
    def needs(cls, spec: HilsSpec, form: PageFormat) -> LayerSchema:
        """Keys, values and a summary.

        A landmark's own key is read where it lies, in the cache; only where keys lie in host memory
        or are quantized, and summaries are not, it is stored once more.
        """
        fields = list(form.keys_and_values(spec.num_kv_heads, spec.head_dim))
        if form.in_host:
            near = zip(NEAR, fields, strict=True)
            near_fields = [replace(f, name=name, window=spec.local_window) for name, f in near]
            fields = [replace(entry, selected=spec.topk) for entry in fields] + near_fields
        if spec.summary != "landmark" or form.kv is not None or form.in_host:
            shape = spec.summary_heads, spec.head_dim
            fields.append(PageField(SUMMARY_KEY, shape, form.dtype, summary=True))
        if spec.bias_by_entropy:
            fields.append(PageField(SUMMARY_BIAS, (spec.num_heads,), torch.float32, summary=True))
        return LayerSchema(tuple(fields))

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> HsaPlan:
        """See the base."""
        plan = HsaPlan(batch, cuts, rows, None if rows is None else rows.stretches)
        if batch.completed.numel():
            for layer, spec in self.layers.items():
                heads = spec.num_kv_heads
                if self.pools.frames[layer] is not None and heads not in plan.stored:
                    near, size = self.place(layer, plan).location, self.pools.schema.page_size
                    plan.stored[heads] = stored_sheets(batch, near, size, heads)
        return plan

    def fronts(self) -> tuple[Front, ...]:
        """The first slots of a row: in them every layer selects every page left of its window."""
        size = self.pools.schema.page_size
        early = min(advice.short_pages(size, s.local_window, s.topk) for s in self.layers.values())
        return (Front(early * size // ROUND * ROUND, early),) if early else ()

    def written(self, layer: int) -> tuple[str, str]:
        """Pages of the window, where those are apart."""
        return super().written(layer) if self.pools.frames[layer] is None else NEAR

    def kv_target(self, layer: int, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor] | None:
        """Landmarks' own keys, where they are kept beside the cache, are taken as they come."""
        spec = self.layers[layer]
        if spec.summary == "landmark" and SUMMARY_KEY in self.pools.pages[layer]:
            return None
        return super().kv_target(layer, plan)

    def run(self, layer: int, inputs: HilsInputs, plan: HsaPlan) -> Tensor:
        """Attend by landmarks: -> [T, h_q, d] in q's dtype."""
        spec, batch, q, lmk_q = self.layers[layer], plan.batch, inputs.q, inputs.lmk_q
        k_cache, v_cache = self.write(layer, inputs, plan)
        place, fields = self.place(layer, plan), self.pools.pages[layer]
        if self.pools.frames[layer] is not None:
            return self._run_framed(layer, inputs, plan)
        # If the landmark's own query pools its page, landmark_attention does it for steps of few
        # slots: no launch of its own.
        own = inputs.summary_query is None and spec.summary == "prior" and not spec.group_query
        tiled = advice.in_tiles(q, spec.num_kv_heads, plan.cuts.chunked, advice.LANDMARK_LINES)
        few = q.is_cuda and own and not tiled and q.shape[0] <= spec.local_window
        if batch.completed.numel() and not few:
            self._summarise(layer, inputs, batch)
        candidates = max(0, (batch.max_slot - spec.local_window + 1) // k_cache.shape[2])
        # On a GPU kernels are compiled for each topk, so there is only one.
        topk = spec.topk if q.is_cuda else max(1, min(spec.topk, candidates))
        key_pool = fields.get(SUMMARY_KEY)

        def attend(part: Part) -> Tensor:
            # The op sees from the width of the table how short the rows are: with few pages it need
            # not score them.
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
            if batch.watch is not None:
                at = batch.watch
                weights, window_weight = advice.shared_weights(scores[at], lse[at], spec.softmax1)
                plan.reads.append(LayerReads(layer, indices[at], weights, window_weight))
            return o

        return plan.attend(attend, tiled=tiled, by_fronts=True)

    def _run_framed(self, layer: int, inputs: HilsInputs, plan: HsaPlan) -> Tensor:
        """The same where pages lie in host memory; the step's keys and values are written."""
        batch, fields, frames = plan.batch, self.pools.pages[layer], self.pools.frames[layer]
        assert frames is not None
        place, far = self.place(layer, plan), (fields["k"], fields["v"])
        table = batch.places[self.pools.schema.group_of[layer]["k"]].page_table
        caches = self.caches(layer)
        spec, completed = self.layers[layer], batch.completed_pages
        framed = FramedPages(spec, caches, place, far, table, frames, completed)
        if batch.completed.numel():
            framed.store(plan.stored[spec.num_kv_heads])
            self._summarise(layer, inputs, batch)
        summaries = fields[SUMMARY_KEY], fields.get(SUMMARY_BIAS)
        return attend_framed(layer, framed, inputs, summaries, plan)

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
