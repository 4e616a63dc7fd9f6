"""Scores of the lightning indexer over a paged cache of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import (
    FLOAT32,
    INDICES,
    INT32,
    check_min,
    check_rows,
    expect,
    expect_within,
    refuse,
)
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache, score_launch
from cairn.ops.sparse_mla.index_scores import (
    REASON,
    TOLERANCES,
    bytes_of_query,
    check_queries,
    score_keys,
    unscored,
)

FRONT = "paged_mqa_logits"


@op(mutates=("logits",))
def paged_mqa_logits_into(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    context: Tensor,
    logits: Tensor,
    preshuffled: bool = False,
    least: int = 0,
    chunked: bool = False,
) -> None:
    """`paged_mqa_logits` into an existing tensor; columns without a score are not changed.

    Args:
        q, weights, cache, page_table, row, context, preshuffled, least, chunked: as in
            `paged_mqa_logits`.
        logits: [T, width] float32, rows of any stride; changed.
    Raises:
        BadArgument: as in `paged_mqa_logits`.
    """
    tokens, heads, dim = q.shape
    size, width = index_cache.page_size(cache, dim), logits.shape[1]
    columns = -(-width // size)
    if not len(cache) or not width:
        return
    column = torch.arange(columns * size, device=q.device)
    block = paging.tokens_per_block(bytes_of_query(heads, columns, size, dim), tokens)
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        pages = page_table[:, :columns][row[part]].long()
        present = (pages >= 0) & (pages < len(cache))
        keys, scales = _gather(cache, pages.clamp(0, len(cache) - 1), dim, preshuffled)
        scores = score_keys(q[part], weights[part], keys, scales)
        # Keys of page ids out of range are never selected.
        scores.masked_fill_(~present.repeat_interleave(size, dim=1), -torch.inf)
        end = context[part].unsqueeze(1)
        scored = (column < end) & (end > least)
        logits[part] = torch.where(scored[:, :width], scores[:, :width], logits[part])


@paged_mqa_logits_into.front
def paged_mqa_logits(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    context: Tensor,
    width: int | None = None,
    preshuffled: bool = False,
    least: int = 0,
    chunked: bool = False,
) -> Tensor:
    """Score of every visible key: scale_s * sum_h weights_h * max(0, q_h . k_s), in float32.

    Args:
        q: [T, Hi, D] float32, bfloat16, float16 or float8_e4m3fn; the scales of a float8 query are
            multiplied into its weights.
        weights: [T, Hi] float32, of any sign.
        cache: index keys [pages, S, D] float32, bfloat16 or float16, or quantized,
            [pages, S * (D + 4)] uint8.
        page_table: [rows, max_pages] int32, physical page ids.
        row: [T] int64, of the page table.
        context: [T] int32 or int64, keys visible to each token: slots 0 .. context - 1. With 0 no
            key is read.
        width: upper bound of `context`; None: slots of the page table.
        preshuffled: the quantized cache has tiles of 16 tokens by 16 dims.
        least: tokens with at most this many visible keys get no scores.
        chunked: dozens of adjacent tokens share a row, as in a prefill; a hint that does not change
            results.
    Returns:
        [T, width] float32, with an aligned row stride; columns without a score are not written.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a row or context
            beyond the page table or `width`.
    """
    dim = check_queries(FRONT, q, weights)[2]
    size = index_cache.check_cache(FRONT, cache, dim, preshuffled, q)
    expect(FRONT, "page_table", page_table, 2, INT32, q)
    if width is None:
        width = page_table.shape[1] * size
    check_min(FRONT, "width", width, 0)
    logits = unscored(len(q), width, q.device)
    paged_mqa_logits_into(
        q, weights, cache, page_table, row, context, logits, preshuffled, least, chunked
    )
    return logits


def _gather(
    cache: Tensor, pages: Tensor, dim: int, preshuffled: bool
) -> tuple[Tensor, Tensor | None]:
    """Keys [n, columns, S, D] of pages [n, columns], and their scales, or None."""
    if not index_cache.is_quantized(cache):
        keys = paging.gather_pages(cache.unsqueeze(1), pages)
        return keys.view(*pages.shape, cache.shape[1], dim), None
    taken = cache.index_select(0, pages.flatten())
    keys, scales = index_cache.unpack(taken, dim, preshuffled)
    return keys.unflatten(0, pages.shape), scales.unflatten(0, pages.shape)


@paged_mqa_logits_into.check
def _(call: Call) -> None:
    name = "paged_mqa_logits_into"
    tokens, _, dim = check_queries(name, call.q, call.weights)
    size = index_cache.check_cache(name, call.cache, dim, call.preshuffled, call.q)
    check_rows(name, tokens, call.row, call.page_table, call.q)
    expect(name, "context", call.context, (tokens,), INDICES, call.q, -1)
    expect(name, "logits", call.logits, (tokens, None), FLOAT32, call.q, 1)
    check_min(name, "least", call.least, 0)
    reach, width = call.page_table.shape[1] * size, call.logits.shape[1]
    if width > reach:
        refuse(name, "width", f"is {width}, not 0 to the {reach} keys of the page table")
    expect_within(name, "row", call.row, len(call.page_table))
    expect_within(name, "context", call.context, width + 1, begin=None)


def _fits(call: Call) -> bool:
    words = not index_cache.is_quantized(call.cache) or score_launch.words_fit(
        call.cache, call.q.shape[2]
    )
    near = call.cache.is_contiguous() and call.page_table.stride(1) == 1
    return words and near and score_launch.accepts(call.q, call.weights, call.logits)


@paged_mqa_logits_into.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> None:
    keys = score_launch.Keys.of_cache(call.cache, call.q.shape[2], call.preshuffled)
    seen = score_launch.KeyRange(
        None, call.context, call.logits.shape[1], call.page_table, call.row, call.least
    )
    score_launch.score(call.q, call.weights, keys, seen, call.logits, call.chunked)


paged_mqa_logits_into.tolerance(TOLERANCES, REASON)
