"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved, short
from cairn.ops.sparse_flash_attn.cases import _lists
from cairn.ops.sparse_flash_attn.convert_vertical_slash_indexes import (
    convert_vertical_slash_indexes,
    convert_vertical_slash_indexes_mergehead,
)
from cairn.ops.sparse_flash_attn.vertical_slash_attention import BLOCK, vertical_slash_attention


def _points(draw: Draw, merged: bool) -> Points:
    tiny = len(draw.layers) == 1
    sizes = ((2, 256, 16, 12),) if tiny else ((4, 8192, 500, 700), (8, 32768, 1000, 2000))
    for heads, context, nv, ns in sizes:
        lengths = torch.full((1,), context, dtype=torch.int32, device=draw.device)
        lists = [_lists(draw, heads, n, context, n == ns)[:1] for n in (nv, ns)]
        counts = [torch.full((heads,), n, dtype=torch.int32, device=draw.device) for n in (nv, ns)]
        which: Any = convert_vertical_slash_indexes
        arguments = [lengths, lengths, *lists, context, 64, 64]
        if merged:
            which = convert_vertical_slash_indexes_mergehead
            arguments[4:4] = counts
        yield Point(
            f"{heads} heads, {short(context)}, {nv} verticals, {ns} slashes",
            draw.args(*arguments),
            moved(*lists) + 4 * heads * (context // 64) * (nv + ns),
            alternatives=(Alternative("definition", which.reference),),
        )


@convert_vertical_slash_indexes.bench
def _(draw: Draw) -> Points:
    return _points(draw, merged=False)


@convert_vertical_slash_indexes_mergehead.bench
def _(draw: Draw) -> Points:
    return _points(draw, merged=True)


def _tables(draw: Draw, heads: int, context: int, verticals: int, slashes: int) -> list[Tensor]:
    """Lists of random vertical lines and diagonals, the main one among them."""
    length = draw.full((1,), context, torch.int32)
    drawn = [
        torch.stack([draw.rand(context).argsort()[:n] for _ in range(heads)]).int().unsqueeze(0)
        for n in (verticals, slashes)
    ]
    lines, diagonals = drawn[0].sort().values, drawn[1].sort(descending=True).values
    diagonals[..., -1] = 0
    return list(convert_vertical_slash_indexes(length, length, lines, diagonals, context, 64, 64))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to all keys, [B, H, S, d]: more work, for the same layer."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@vertical_slash_attention.bench
def _(draw: Draw) -> Points:
    tiny = draw.sizes == "tiny"
    sizes = ((2, 100, 5, 4),) if tiny else ((8, 2048, 100, 8), (8, 32768, 1000, 32))
    for heads, context, verticals, slashes in sizes:
        q, k, v = (draw.randn(1, context, heads, 16 if tiny else 128) for _ in range(3))
        tables = _tables(draw, heads, context, verticals, slashes)
        listed = BLOCK * (BLOCK * tables[0].sum() + tables[2].sum())
        results = torch.empty_like(q), draw.full((1, heads, context), 0.0)
        plain = draw.args(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
        yield Point(
            f"{heads} heads, {short(context)}, {verticals} verticals, {slashes} slashes",
            draw.args(
                q,
                k,
                v,
                *results,
                *tables,
                None,
                None,
                context,
                q.shape[-1] ** -0.5,
                True,
                0.0,
            ),
            moved(q, q, k, v),
            4.0 * q.shape[-1] * int(listed),
            (Alternative("sdpa", _sdpa, plain),),
        )
