"""Argument checks shared by the landmark ops."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.checks import (
    FLOAT32,
    FLOATS,
    INT64,
    check_cache,
    check_min,
    check_queries,
    expect,
    refuse,
)
from cairn.ops.landmark.select_task import STRATEGIES


def check_rule(op: str, window: int, topk: int, strategy: str, least: int = 1) -> None:
    """Raise BadArgument for an unknown strategy, a window below `least`, or a topk below 1."""
    if strategy not in STRATEGIES:
        refuse(op, "strategy", f"is {strategy!r}", f"It is one of {', '.join(STRATEGIES)}")
    check_min(op, "window", window, least)
    check_min(op, "topk", topk, 1)


def check_summaries(
    op: str,
    lmk_q: Tensor,
    summary_key: Tensor,
    summary_bias: Tensor | None,
    pages: int | None,
    kv_heads: int | None,
    strategy: str,
) -> None:
    """Raise BadArgument unless queries can be scored against summaries.

    Args:
        op: name of the op, for messages.
        lmk_q: [T, h_q, d], already checked.
        summary_key: [pages, h_R, d]; h_q is a multiple of h_R, except with the strategy "group".
        summary_bias: [pages, h_q] float32, dense, or None; with "group" one for each KV head.
        pages: number of pages of the caches; None: as many as summaries.
        kv_heads: h_kv; None: h_R. A divisor of h_q, and with "group" of h_R.
    """
    _, heads, dim = lmk_q.shape
    expect(op, "summary_key", summary_key, 3, FLOATS, lmk_q)
    total, own, width = summary_key.shape
    if width != dim or (pages is not None and total != pages):
        wanted = f"[{'any' if pages is None else pages}, any, {dim}]"
        refuse(op, "summary_key", f"has shape {list(summary_key.shape)}, not {wanted}")
    groups = min(heads, own if kv_heads is None else kv_heads)
    if groups < 1 or heads % groups:
        refuse(op, "lmk_q", f"has {heads} heads, not a multiple of the {groups} KV heads")
    summed = strategy == "group"
    if own < 1 or (own % groups if summed else heads % own):
        refuse(op, "summary_key", f"has {own} heads, the queries {heads}, the cache {groups}")
    if summary_bias is not None:
        shape = (total, groups if summed else heads)
        expect(op, "summary_bias", summary_bias, shape, FLOAT32, lmk_q, -1)


def check_keys(op: str, k_cache: Tensor) -> None:
    """Raise BadArgument for pages [pages, h_kv, S, d] with one slot, which would only hold a
    landmark."""
    if k_cache.shape[2] < 2:
        refuse(op, "k_cache", f"has shape {list(k_cache.shape)}: pages without a key")


def check_pooling(op: str, query: Tensor, k_cache: Tensor, pages: Tensor) -> None:
    """Raise BadArgument unless query [N, h_q, d] can pool the keys of pages [N] int64, dense."""
    _, heads, _, dim = check_cache(op, k_cache, query)
    check_keys(op, k_cache)
    count, _ = check_queries(op, "query", query, heads, dim)
    expect(op, "pages", pages, (count,), INT64, query, -1)
