"""The largest numbers along a dim."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Alternative, Draw, Point, Points, moved
from cairn.ops.checks import refuse
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def fast_topk(values: Tensor, topk: int, dim: int) -> tuple[Tensor, Tensor]:
    """The topk largest values along a dim, in descending order.

    Args:
        values: any shape and dtype that torch orders.
        topk: 1 <= topk <= values.shape[dim].
        dim: may be negative.
    Returns:
        values and their indices (int64), with topk in place of the dim's size.
    Raises:
        BadArgument: for a dim or a topk that `values` does not have.
    """
    if topk == 1:
        best = torch.max(values, dim=dim, keepdim=True)
        return best.values, best.indices
    found = torch.topk(values, topk, dim=dim)
    return found.values, found.indices


@fast_topk.check
def _(values: Tensor, topk: int, dim: int) -> None:
    if not -values.dim() <= dim < values.dim():
        refuse("fast_topk", "dim", f"is {dim}: values has shape {list(values.shape)}")
    if not 1 <= topk <= values.shape[dim]:
        refuse("fast_topk", "topk", f"is {topk}, not 1 to {values.shape[dim]}")


@fast_topk.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(5, 63), 7, 1)
    yield make.args(make.randn(5, 63), 1, 0)
    yield make.args(make.rand(4, 3, 100).to(torch.bfloat16).cumsum(-1), 1, -1)
    yield make.args(make.randn(3, 100)[:, ::2], 50, -1)
    yield make.args(make.randn(0, 8), 2, 1)


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
