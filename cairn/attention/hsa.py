"""Hierarchical sparse attention: a local window, and a few pages found by their landmarks.

One layer, for a query at slot s (the mathematics is HiLS-Attention's):

1. the step's keys and values are written to their pages;
2. every page whose last slot runs in this step gets its summary, stored by page id;
3. the window gives its output and its log-sum-exp;
4. the summaries of all pages left of the window are scored, and each KV head keeps the best;
5. one softmax over the selected pages' scores, the window's log-sum-exp and (softmax1) a zero
   weighs the pages' own attention outputs against the window's.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, AttentionLayer, Batch, LandmarkRule
from cairn.cache.pools import CacheSpec


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
            bias=rule.bias,
        )

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
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
        if batch.completed.numel():
            self._summarise(k_cache, layer, batch, summary_query)
        o_window, lse = ops.window_attention(
            q,
            k_cache,
            v_cache,
            batch.row,
            batch.slot,
            batch.page_table,
            rule.window,
            aligned=True,
            mask_landmarks=True,
        )
        if batch.counters is not None:
            batch.counters.queries += q.shape[0]
        candidates = max(0, (batch.max_slot - rule.window + 1) // k_cache.shape[2])
        if candidates == 0:
            # Every page of every row lies under its window.
            heads = layer.num_kv_heads if rule.strategy == "group" else layer.num_heads
            weights, window_weight = _weigh(lse.new_empty((len(lse), heads, 0)), lse, rule)
            if batch.watch is not None:
                none = batch.slot.new_empty((*k.shape[:2], 0))
                batch.record(layer.index, none, weights, window_weight)
            return ops.blend_window(torch.zeros_like(o_window), o_window, window_weight, q.dtype)
        indices, scores = self._select(lmk_q, lse, layer, batch, min(rule.topk, candidates))
        if batch.counters is not None:
            batch.counters.selected = batch.counters.selected + (indices >= 0).sum()
        weights, window_weight = _weigh(scores, lse, rule)
        batch.record(layer.index, indices, weights, window_weight)
        o_pages = ops.page_attention(
            q, k_cache, v_cache, batch.row, batch.page_table, indices, weights
        )
        return ops.blend_window(o_pages, o_window, window_weight, q.dtype)

    def _summarise(
        self, k_cache: Tensor, layer: AttentionLayer, batch: Batch, query: Tensor | None
    ) -> None:
        """Store key and bias of the pages that this step completes."""
        rule = layer.landmark
        assert rule is not None
        pages = batch.completed_pages
        key_pool = self.pools.summary_key[layer.index]
        bias_pool = self.pools.summary_bias[layer.index]
        if key_pool is None and bias_pool is None:
            return
        if query is not None:
            key, bias = ops.prior_summary(query, k_cache, pages)
            if bias_pool is not None:
                bias_pool[pages] = bias
            if rule.summary == "prior" and not rule.group_query and key_pool is not None:
                key_pool[pages] = key
        if key_pool is None:
            return
        if rule.summary == "mean":
            key_pool[pages] = ops.mean_summary(k_cache, pages)
        elif rule.group_query and query is not None:
            group = query.unflatten(1, (layer.num_kv_heads, -1)).float().mean(2).to(query.dtype)
            key_pool[pages] = ops.prior_summary(group, k_cache, pages)[0]

    def _select(
        self, lmk_q: Tensor, lse: Tensor, layer: AttentionLayer, batch: Batch, topk: int
    ) -> tuple[Tensor, Tensor]:
        """Indices [T, h_kv, topk] and scores of the selected pages."""
        rule = layer.landmark
        assert rule is not None
        k_cache = self.pools.k[layer.index]
        key_pool = self.pools.summary_key[layer.index]
        return ops.select_pages(
            lmk_q,
            k_cache[:, :, -1] if key_pool is None else key_pool,
            self.pools.summary_bias[layer.index],
            lse,
            batch.row,
            batch.slot,
            batch.page_table,
            k_cache.shape[2],
            rule.window,
            topk,
            strategy=rule.strategy,
            num_kv_heads=layer.num_kv_heads,
        )


def _weigh(scores: Tensor, lse: Tensor, rule: LandmarkRule) -> tuple[Tensor, Tensor]:
    """Page weights [T, h_q, K] and window weight [T, h_q]."""
    if rule.strategy != "group":
        return ops.page_weights(scores, lse, rule.softmax1)
    # The group strategy has one score a KV head: its heads share one softmax, against the window's
    # mass summed over the group.
    kv_heads = scores.shape[1]
    group = lse.shape[1] // kv_heads
    shared = torch.logsumexp(lse.unflatten(1, (kv_heads, group)), dim=2)
    weights, window_weight = ops.page_weights(scores, shared, rule.softmax1)
    return (
        weights.repeat_interleave(group, dim=1),
        window_weight.repeat_interleave(group, dim=1),
    )
