"""Latent attention over selected cells of the paged cache (DeepSeek-V3.2 report, equation 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOAT32, FLOATS, INDICES, INT32, check_dtype, expect, refuse
from cairn.ops.registry import op
from cairn.ops.sparse_mla import records
from cairn.ops.sparse_mla.samples import is_tiny, sizes_of
from cairn.ops.testing import Cases, Make


@op
def sparse_mla(
    q: Tensor,
    cache: Tensor,
    cells: Tensor,
    length: Tensor,
    scale: float,
    value_dim: int,
    sink: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every token over cells of its own, which all of its heads share.

    A record of the cache, [latent | rotary key], is a key, and its latent the value. Cell c counts
    for token t if it is one of the first length[t] in its list and in the cache; any other number
    may stand in its place. A sink adds e^sink to the denominator: o / (1 + e^(sink - lse)).

    Args:
        q: [T, H, r + dr] float32, bfloat16 or float16.
        cache: [pages, S, r + dr] of q's dtype, or quantized, [pages, S, r + 4 * (r / 128) + 2 * dr]
            uint8 (`mla_kv_store`).
        cells: [T, W] int32, page * S + slot in the page.
        length: [T] int32 or int64.
        scale: of the dot products.
        value_dim: r.
        sink: [H] float32, or None.
        dtype: of o; None: float32.
    Returns:
        (o [T, H, r], lse [T, H] float32, without the sink); a token without a cell has o = 0,
        lse = -inf.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    tokens, heads, width = q.shape
    most = cells.shape[1]
    o = torch.zeros((tokens, heads, value_dim), dtype=dtype or torch.float32, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=q.device)
    capacity = cache.shape[0] * cache.shape[1]
    if not capacity or not most:
        return o, lse
    place = torch.arange(most, device=q.device)
    block = paging.tokens_per_block(4 * most * (width + heads), tokens)
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        cell = cells[part].long()
        hidden = (place >= length[part].unsqueeze(1)) | (cell < 0) | (cell >= capacity)
        # What is hidden may lie in memory that nobody owns, which may hold NaN.
        taken = records.take(cache, cell.clamp(0, capacity - 1), value_dim)
        taken.masked_fill_(hidden.unsqueeze(-1), 0)
        scores = torch.bmm(q[part].float(), taken.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        values, total = paging.weigh(scores, taken[..., :value_dim])
        if sink is not None:
            # Without a cell o is 0, whatever the sink: -inf - -inf is no number.
            share = 1 / (1 + torch.exp(sink.unsqueeze(-1) - total))
            values.mul_(share.masked_fill(total.isneginf(), 0))
        o[part], lse[part] = values, total.squeeze(-1)
    return o, lse


@sparse_mla.check
def _(
    q: Tensor,
    cache: Tensor,
    cells: Tensor,
    length: Tensor,
    scale: float,
    value_dim: int,
    sink: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    name = "sparse_mla"
    expect(name, "q", q, 3, FLOATS)
    tokens, heads, width = q.shape
    if not heads:
        refuse(name, "q", f"has shape {list(q.shape)}: no head")
    if not 1 <= value_dim <= width:
        refuse(name, "value_dim", f"is {value_dim}, not 1 to the {width} numbers of q's heads")
    records.check_cache(name, cache, value_dim, width - value_dim, q, q.dtype)
    expect(name, "cells", cells, (tokens, None), INT32, q)
    expect(name, "length", length, (tokens,), INDICES, q)
    if sink is not None:
        expect(name, "sink", sink, (heads,), FLOAT32, q)
    check_dtype(name, dtype)


@sparse_mla.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, latent, rope in (
        (torch.float32, 4, 3, 128, 16),
        (torch.bfloat16, 16, 8, 256, 32),
    ):
        cache = make.randn(9, size, latent + rope, dtype=dtype)
        cache[7:] = torch.nan
        small = records.quantize(
            *(part.flatten(0, 1) for part in cache.split((latent, rope), dim=-1))
        ).view(9, size, -1)
        q = make.randn(6, heads, latent + rope, dtype=dtype)
        cells = make.randint(0, 7 * size, 6, 20, dtype=torch.int32)
        length = make.tensor([20, 0, 1, 19, 7, 20], torch.int32)
        # Behind the length, and where no cell can be.
        cells[2, 1:], cells[4, 7:] = 8 * size, 7 * size + 1
        cells[0, ::3], cells[3, 5], cells[3, 6] = -1, 1 << 30, -(1 << 31)
        cells[5] = make.tensor([9 * size, -2] * 10, torch.int32)
        sink = make.randn(heads)
        sink[0], sink[1] = torch.inf, -torch.inf
        for records_of in (cache, small):
            given = (q, records_of, cells, length, 0.1, latent)
            yield make.args(*given)
            yield make.args(*given[:3], length.long(), *given[4:], sink=sink, dtype=dtype)
            yield make.args(q[:0], records_of, cells[:0], length[:0], *given[4:])
        yield make.args(q, cache, cells[:, :0], length, 0.1, latent)
        wide = make.randn(6, 2 * heads, latent + rope, dtype=dtype)[:, ::2]
        yield make.args(wide, cache, cells, length, 0.1, latent, sink)


@sparse_mla.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    widths = (sizes.latent, sizes.rope)
    # Of DeepSeek's 128 heads on one device and on one of eight.
    steps = ((64, 128), (64, 16), (4, 128), (1, 128))
    for tokens, heads in ((3, 4),) if is_tiny(draw) else steps:
        pages = tokens * 2 * sizes.topk // sizes.page
        cache = draw.randn(pages, sizes.page, sum(widths))
        parts = (part.flatten(0, 1) for part in cache.split(widths, dim=-1))
        small = records.quantize(*parts).view(pages, sizes.page, -1)
        q = draw.randn(tokens, heads, sum(widths))
        some = draw.rand(tokens, 2 * sizes.topk).argsort(dim=1)[:, : sizes.topk].sort().values
        cells = (some + 2 * sizes.topk * draw.arange(tokens).unsqueeze(1)).to(torch.int32)
        length = draw.full((tokens,), sizes.topk, torch.int32)
        for kind, of in (("plain", cache), ("float8", small)):
            yield Point(
                f"{tokens} x {heads} heads, {kind}",
                draw.args(q, of, cells, length, 0.1, sizes.latent),
                moved(q, cells) + cells.numel() * of[0, 0].nbytes + tokens * heads * 4 * widths[0],
                2.0 * cells.numel() * heads * (2 * widths[0] + widths[1]),
            )
