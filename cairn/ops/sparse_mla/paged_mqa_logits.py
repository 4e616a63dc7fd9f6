"""Scores of the lightning indexer over keys in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, check_rows, expect, expect_within, refuse
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache
from cairn.ops.sparse_mla.index_scores import bytes_of_query, check_queries, score_keys


@op
def paged_mqa_logits(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    context: Tensor,
    width: int | None = None,
    preshuffled: bool = False,
) -> Tensor:
    """Score of every visible key: scale_s * sum_h weights_h * max(0, q_h . k_s), in float32.

    Args:
        q: [T, Hi, D] float32, bfloat16, float16 or float8_e4m3fn; what scales a float8 query is in
            its weights.
        weights: [T, Hi] float32, of any sign.
        cache: index keys [pages, S, D] float32, bfloat16 or float16, or quantized,
            [pages, S * (D + 4)] uint8.
        page_table: [rows, max_pages] int32, logical to physical page.
        row: [T] int64, of the page table.
        context: [T] int32 or int64, keys visible to each token: slots 0 .. context - 1. Without
            any, none is read.
        width: most keys that a token may see; None: those of the whole page table.
        preshuffled: the quantized cache has tiles of 16 tokens by 16 dims.
    Returns:
        [T, width] float32. From column `context` on it is undefined (-inf in the definition).
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a row or context
            beyond the page table or `width`.
    """
    tokens, heads, dim = q.shape
    size = index_cache.page_size(cache, dim)
    width = page_table.shape[1] * size if width is None else width
    columns = -(-width // size)
    logits = torch.full((tokens, width), -torch.inf, dtype=torch.float32, device=q.device)
    if not len(cache):
        return logits
    column = torch.arange(columns * size, device=q.device)
    block = paging.tokens_per_block(bytes_of_query(heads, columns, size, dim), tokens)
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        pages = page_table[:, :columns][row[part]].long()
        present = (pages >= 0) & (pages < len(cache))
        keys, scales = _gather(cache, pages.clamp(0, len(cache) - 1), dim, preshuffled)
        scores = score_keys(q[part], weights[part], keys, scales)
        seen = (column < context[part].unsqueeze(1)) & present.repeat_interleave(size, dim=1)
        logits[part] = scores.masked_fill_(~seen, -torch.inf)[:, :width]
    return logits


def _gather(
    cache: Tensor, pages: Tensor, dim: int, preshuffled: bool
) -> tuple[Tensor, Tensor | None]:
    """Keys [n, columns, S, D] of pages [n, columns], and their scales, if they have any."""
    if not index_cache.is_quantized(cache):
        keys = paging.gather_pages(cache.unsqueeze(1), pages)
        return keys.view(*pages.shape, cache.shape[1], dim), None
    taken = cache.index_select(0, pages.flatten())
    keys, scales = index_cache.unpack(taken, dim, preshuffled)
    return keys.unflatten(0, pages.shape), scales.unflatten(0, pages.shape)


@paged_mqa_logits.check
def _(call: Call) -> None:
    name = "paged_mqa_logits"
    tokens, _, dim = check_queries(name, call.q, call.weights)
    size = index_cache.check_cache(name, call.cache, dim, call.preshuffled, call.q)
    check_rows(name, tokens, call.row, call.page_table, call.q)
    expect(name, "context", call.context, (tokens,), INDICES, call.q, -1)
    reach = call.page_table.shape[1] * size
    if call.width is not None and not 0 <= call.width <= reach:
        refuse(name, "width", f"is {call.width}, not 0 to the {reach} keys of the page table")
    expect_within(name, "row", call.row, len(call.page_table))
    expect_within(
        name, "context", call.context, (reach if call.width is None else call.width) + 1, begin=None
    )
