"""Latent attention over selected slots of the paged cache (DeepSeek-V3.2 report, equation 2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, INDICES, INT32, check_dtype, expect, refuse
from cairn.ops.registry import op
from cairn.ops.sparse_mla import attend_launch, records


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
    extra_cache: Tensor | None = None,
    extra_cells: Tensor | None = None,
    extra_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every token over its own list of cells (slots of the cache), shared by
    all heads.

    A record of the cache, [latent | rotary key], is a key, and its latent is the value. Token t
    attends to the first length[t] cells of its list; entries that are not cells of the cache are
    ignored. A sink adds e^sink to the denominator: o / (1 + e^(sink - lse)).

    Args:
        q: [T, H, r + dr] float32, bfloat16 or float16.
        cache: [pages, S, r + dr] of q's dtype, or quantized, [pages, S, r + 4 * (r / 128) + 2 * dr]
            uint8 (`mla_kv_store`); or, where value_dim is q's width, quantised records whose value
            is the whole record.
        cells: [T, W] int32, page * S + slot in the page.
        length: [T] int32 or int64.
        scale: softmax scale.
        value_dim: r.
        sink: [H] float32, or None.
        dtype: dtype of o; None: float32.
        extra_cache, extra_cells, extra_length: further cells in the same softmax, in another
            cache of such records; all three or none.
    Returns:
        (o [T, H, r], lse [T, H] float32, without the sink); a token without a cell has o = 0,
        lse = -inf.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    tokens, heads, width = q.shape
    o = torch.zeros((tokens, heads, value_dim), dtype=dtype or torch.float32, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=q.device)
    lists = [(cache, cells, length)]
    if extra_cache is not None and extra_cells is not None and extra_length is not None:
        lists.append((extra_cache, extra_cells, extra_length))
    lists = [given for given in lists if given[0].shape[0] * given[0].shape[1]]
    most = sum(own.shape[1] for _, own, _ in lists)
    if not most:
        return o, lse
    block = paging.tokens_per_block(4 * most * (width + heads), tokens)
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        found = [
            _taken(own, named[part], count[part], value_dim, width) for own, named, count in lists
        ]
        taken, hidden = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        scores = torch.bmm(q[part].float(), taken.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        values, total = paging.weigh(scores, taken[..., :value_dim])
        if sink is not None:
            # Without a cell o is 0 whatever the sink; -inf - -inf would be NaN.
            share = 1 / (1 + torch.exp(sink.unsqueeze(-1) - total))
            values.mul_(share.masked_fill(total.isneginf(), 0))
        o[part], lse[part] = values, total.squeeze(-1)
    return o, lse


def _taken(
    cache: Tensor, cells: Tensor, length: Tensor, value_dim: int, width: int
) -> tuple[Tensor, Tensor]:
    """Records [n, W, width] float32 of lists of cells, and a mask of the entries without one [n,
    W]."""
    capacity = cache.shape[0] * cache.shape[1]
    cell, place = cells.long(), torch.arange(cells.shape[1], device=cells.device)
    hidden = (place >= length.unsqueeze(1)) | (cell < 0) | (cell >= capacity)
    # Masked records may be in free pages, which may hold NaN.
    taken = records.take(cache, cell.clamp(0, capacity - 1), value_dim, width)
    return taken.masked_fill_(hidden.unsqueeze(-1), 0), hidden


def check_records(op: str, q: Tensor, cache: Tensor, value_dim: int) -> tuple[int, int, int]:
    """Raise BadArgument unless q is [T, H, r + dr] and the cache holds such records. Returns
    (T, H, S)."""
    expect(op, "q", q, 3, FLOATS)
    tokens, heads, width = q.shape
    if not heads:
        refuse(op, "q", f"has shape {list(q.shape)}: no head")
    if not 1 <= value_dim <= width:
        refuse(op, "value_dim", f"is {value_dim}, not 1 to the {width} numbers of q's heads")
    size = records.check_cache(op, cache, value_dim, width - value_dim, q, q.dtype)
    return tokens, heads, size


@sparse_mla.check
def _(call: Call) -> None:
    name = "sparse_mla"
    tokens, heads, _ = check_records(name, call.q, call.cache, call.value_dim)
    expect(name, "cells", call.cells, (tokens, None), INT32, call.q)
    expect(name, "length", call.length, (tokens,), INDICES, call.q)
    if call.sink is not None:
        expect(name, "sink", call.sink, (heads,), FLOAT32, call.q)
    check_dtype(name, call.dtype)
    extra = {n: getattr(call, n) for n in ("extra_cache", "extra_cells", "extra_length")}
    missing = [n for n, value in extra.items() if value is None]
    if len(missing) == len(extra):
        return
    if missing:
        refuse(name, missing[0], "is None, unlike the others of the second list")
    widths = call.value_dim, call.q.shape[2] - call.value_dim
    records.check_cache(name, call.extra_cache, *widths, call.q, call.q.dtype, "extra_cache")
    expect(name, "extra_cache", call.extra_cache, (None, None, call.cache.shape[2]))
    expect(name, "extra_cells", call.extra_cells, (tokens, None), INT32, call.q)
    expect(name, "extra_length", call.extra_length, (tokens,), INDICES, call.q)


def _fits(call: Call) -> bool:
    near = call.cells.is_contiguous() and call.length.is_contiguous()
    near = near and attend_launch.accepts(call.q, call.cache, call.value_dim)
    if call.extra_cache is None:
        return near
    listed = call.extra_cells.is_contiguous() and call.extra_length.is_contiguous()
    return near and listed and attend_launch.side_by_side(call.cache, call.extra_cache)


@sparse_mla.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> tuple[Tensor, Tensor]:
    candidates = attend_launch.Candidates(call.length, call.cells.shape[1], call.cells)
    if call.extra_cache is not None:
        extra = attend_launch.Candidates(
            call.extra_length, call.extra_cells.shape[1], call.extra_cells
        )
        candidates = replace(candidates, extra=extra, extra_cache=call.extra_cache)
    o, lse, _ = attend_launch.attend(
        call.q,
        call.cache,
        candidates,
        call.scale,
        call.value_dim,
        call.sink,
        call.dtype or torch.float32,
    )
    return o, lse


sparse_mla.tolerance(
    {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)},
    "a sum over hundreds of products in another order, of which a softmax is taken",
)
