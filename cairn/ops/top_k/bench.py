"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.top_k.fast_topk import fast_topk
from cairn.ops.top_k.fast_topk_transform_fused import fast_topk_transform_fused
from cairn.ops.top_k.fast_topk_transform_ragged_fused import fast_topk_transform_ragged_fused
from cairn.ops.top_k.fast_topk_v2 import fast_topk_v2
from cairn.ops.top_k.samples import points


def _sorted(values: Tensor, topk: int, dim: int) -> Tensor:
    return values.sort(dim=dim, descending=True).values.narrow(dim, 0, topk)


@fast_topk.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, layer.hidden, dtype=torch.float32)
        for topk in (1, 8):
            yield Point(
                f"{layer.name}: {topk} of {rows} x {layer.hidden}",
                draw.args(x, topk, 1),
                moved(x) + 12 * rows * topk,
                alternatives=(Alternative("sort", _sorted),),
            )


def _by_topk(
    score: Tensor, lengths: Tensor, table: Tensor, cu_seqlens_q: Tensor, topk: int
) -> Tensor:
    """torch's operators for one row per request, all of equal length."""
    return table.gather(1, score.topk(topk).indices.sort().values)


@fast_topk_transform_fused.bench
def _(draw: Draw) -> Points:
    def table(rows: int, width: int) -> Tensor:
        return draw.randint(0, rows * width, rows, width, dtype=torch.int32)

    def bounds(rows: int, width: int) -> Tensor:
        return torch.arange(rows + 1, dtype=torch.int32, device=draw.device)

    return points(draw, _by_topk, table, bounds)


def _ragged_by_topk(score: Tensor, lengths: Tensor, offset: Tensor, topk: int) -> Tensor:
    """torch's operators for rows of equal length."""
    return score.topk(topk).indices.sort().values.to(torch.int32) + offset[:, None]


@fast_topk_transform_ragged_fused.bench
def _(draw: Draw) -> Points:
    def offset(rows: int, width: int) -> Tensor:
        return torch.arange(rows, dtype=torch.int32, device=draw.device) * width

    return points(draw, _ragged_by_topk, offset)


def _v2_by_topk(score: Tensor, lengths: Tensor, topk: int) -> Tensor:
    """torch's operator for rows of equal length."""
    return score.topk(topk).indices.sort().values.to(torch.int32)


@fast_topk_v2.bench
def _(draw: Draw) -> Points:
    return points(draw, _v2_by_topk)
