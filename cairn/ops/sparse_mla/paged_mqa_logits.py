"""Scores of the lightning indexer over keys in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.cache.quantized import BYTES
from cairn.ops.checks import INDICES, check_rows, expect, expect_within, refuse
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache
from cairn.ops.sparse_mla.index_scores import bytes_of_query, check_queries, score_keys
from cairn.ops.sparse_mla.samples import decode_steps
from cairn.ops.testing import Cases, Make


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
def _(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    context: Tensor,
    width: int | None = None,
    preshuffled: bool = False,
) -> None:
    name = "paged_mqa_logits"
    tokens, _, dim = check_queries(name, q, weights)
    size = index_cache.check_cache(name, cache, dim, preshuffled, q)
    check_rows(name, tokens, row, page_table, q)
    expect(name, "context", context, (tokens,), INDICES, q, -1)
    reach = page_table.shape[1] * size
    if width is not None and not 0 <= width <= reach:
        refuse(name, "width", f"is {width}, not 0 to the {reach} keys of the page table")
    expect_within(name, "row", row, len(page_table))
    expect_within(name, "context", context, (reach if width is None else width) + 1, begin=None)


@paged_mqa_logits.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, dim in ((torch.float32, 4, 3, 24), (torch.bfloat16, 16, 4, 32)):
        paged = make.paged((70, 3, 0, 41), 1, size, dim, dtype=dtype)
        keys, table = paged.k_cache[:, 0], paged.page_table
        row, slot, _ = paged.queries((20, 1, 0, 3))
        q = make.randn(len(row), heads, dim, dtype=dtype)
        weights = make.randn(len(row), heads)
        context = (slot + 1).to(torch.int32)
        context[5] = 0
        context[7] = -1
        yield make.args(q, weights, keys, table, row, context)
        yield make.args(q, weights, keys, table, row, context.long(), width=70)
        yield make.args(q[:0], weights[:0], keys, table, row[:0], context[:0])
        small = index_cache.pack(keys, preshuffled=False, scale_ue8m0=True)
        yield make.args(q, weights, small, table, row, context, width=70)
        if size == 16:
            own = index_cache.quantize(q.flatten(0, 1), scale_ue8m0=False)[0].view(q.shape)
            tiles = index_cache.pack(keys, preshuffled=True, scale_ue8m0=False)
            yield make.args(own, weights, tiles, table, row, context, preshuffled=True)


@paged_mqa_logits.bench
def _(draw: Draw) -> Points:
    for step in decode_steps(draw):
        heads, dim, size = step.sizes.index_heads, step.sizes.index_dim, step.sizes.page
        keys = step.tokens * step.context
        token = dim + index_cache.SCALE_BYTES
        cache = draw.randint(0, 60, step.pages, size * token, dtype=BYTES)
        q = draw.randn(step.tokens, heads, dim)
        numbers = index_cache.quantize(q, scale_ue8m0=False)[0]
        weights = draw.randn(step.tokens, heads, dtype=torch.float32)
        row = draw.arange(step.tokens)
        context = draw.full((step.tokens,), step.context, torch.int32)
        yield Point(
            str(step),
            draw.args(numbers, weights, cache, step.page_table, row, context),
            moved(cache, numbers, weights) + 4 * keys,
            2.0 * keys * heads * dim,
        )
