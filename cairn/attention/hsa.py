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

from typing import ClassVar

from torch import Tensor

from cairn import ops
from cairn.attention.base import (
    AttentionBackend,
    AttentionLayer,
    Batch,
    LayerReads,
    Part,
)
from cairn.cache.pools import CacheSpec
from cairn.ops.attention.launch import LANDMARK_LINES, in_tiles
from cairn.ops.landmark.page_weights import shared_weights


class HsaBackend(AttentionBackend):
    """Landmark selection over the paged cache; needs page_size == the model's chunk size."""

    name: ClassVar[str] = "hsa"

    @classmethod
    def needs(cls, layer: AttentionLayer) -> CacheSpec:
        """Keys, values and a summary; a landmark's own key is read where it lies, in the cache."""
        rule = layer.landmark
        if rule is None:
            raise ValueError(f"layer {layer.index} has no landmark rule")
        per_query_head = rule.summary == "prior" and not rule.group_query
        heads = layer.num_heads if per_query_head else layer.num_kv_heads
        return CacheSpec(
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            num_heads=layer.num_heads,
            summary_heads=0 if rule.summary == "landmark" else heads,
            own_key=rule.summary == "landmark",
            bias=rule.bias,
        )

    def target(self, layer: AttentionLayer) -> tuple[Tensor, Tensor] | None:
        """Landmarks' own keys, where they are kept beside the cache, are taken as they come."""
        rule = layer.landmark
        kept = self.pools.summary_key[layer.index] is not None
        if kept and rule is not None and rule.summary == "landmark":
            return None
        return super().target(layer)

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: Batch,
        lmk_q: Tensor | None,
        summary_query: Tensor | None,
    ) -> Tensor:
        """Attend by landmarks; `lmk_q` is required. Shapes as in `Batch.attend`."""
        rule = layer.landmark
        if rule is None or lmk_q is None:
            raise ValueError(f"layer {layer.index} has no landmark rule or no landmark query")
        k_cache, v_cache = self.write(k, v, layer, batch)
        # Where each landmark's own z pools its page, a few of them do it on the way: no launch.
        own = summary_query is None and rule.summary == "prior" and not rule.group_query
        tiled = in_tiles(q, layer.num_kv_heads, batch.chunked, LANDMARK_LINES)
        few = q.is_cuda and own and not tiled and q.shape[0] <= rule.window
        if batch.completed.numel() and not few:
            if summary_query is None and (rule.bias or rule.summary == "prior"):
                summary_query = lmk_q[batch.completed]
            self._summarise(k, k_cache, layer, batch, summary_query)
        key_pool = self.pools.summary_key[layer.index]
        candidates = max(0, (batch.max_slot - rule.window + 1) // k_cache.shape[2])
        # A kernel is compiled for a topk: a GPU knows one.
        topk = rule.topk if q.is_cuda else max(1, min(rule.topk, candidates))

        def attend(part: Part) -> Tensor:
            # How wide the table is tells the op how short the rows are: that there is nothing to
            # choose, or little to pass over.
            page_table = batch.page_table[:, : part.pages]
            o, indices, scores, lse = ops.landmark_attention(
                part.of(q),
                part.of(lmk_q),
                k_cache,
                v_cache,
                k_cache[:, :, -1] if key_pool is None else key_pool,
                self.pools.summary_bias[layer.index],
                part.row,
                part.slot,
                page_table,
                rule.window,
                topk,
                rule.softmax1,
                strategy=rule.strategy,
                store_summaries=few,
                chunked=part.chunked,
            )
            if batch.watch is not None:
                at = batch.watch
                weights, window_weight = shared_weights(scores[at], lse[at], rule.softmax1)
                batch.reads.append(LayerReads(layer.index, indices[at], weights, window_weight))
            return o

        return batch.attend_parts(tiled, attend, by_fronts=True)

    def _summarise(
        self,
        k: Tensor | None,
        k_cache: Tensor,
        layer: AttentionLayer,
        batch: Batch,
        query: Tensor | None,
    ) -> None:
        """Store key and bias of the pages that this step, with the keys k, completes."""
        rule = layer.landmark
        assert rule is not None
        pages = batch.completed_pages
        key_pool = self.pools.summary_key[layer.index]
        bias_pool = self.pools.summary_bias[layer.index]
        own_key = rule.summary == "prior" and not rule.group_query
        if query is not None:
            ops.store_prior_summary(query, k_cache, pages, key_pool if own_key else None, bias_pool)
        if key_pool is None or own_key:
            return
        # A negative number, which pads a step, is the last page: it belongs to nobody then.
        pages = pages % len(k_cache)
        if rule.summary == "landmark":
            assert k is not None
            key_pool[pages] = k[batch.completed]
        elif rule.summary == "mean":
            key_pool[pages] = ops.mean_summary(k_cache, pages).to(key_pool.dtype)
        elif rule.group_query and query is not None:
            group = query.unflatten(1, (layer.num_kv_heads, -1)).float().mean(2).to(query.dtype)
            key_pool[pages] = ops.prior_summary(group, k_cache, pages)[0]
