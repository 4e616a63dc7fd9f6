"""Rows divided by their lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def l2norm(input: Tensor, eps: float = 1e-6) -> Tensor:
    """input * rsqrt(sum(input^2) + eps), in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        eps: added to the sum of squares, not to their mean.
    Raises:
        BadArgument: for another shape or dtype.
    """
    x = input.float()
    return (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + eps)).to(input.dtype)


@l2norm.check
def _(input: Tensor, eps: float = 1e-6) -> None:
    expect("l2norm", "input", input, dtypes=FLOATS)
    if input.dim() == 0:
        refuse("l2norm", "input", "has shape [], not [..., H]")


@l2norm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96))
    yield make.args(make.randn(2, 3, 65, dtype=torch.bfloat16), 1e-5)
    yield make.args(make.full((2, 8), 0.0))
    yield make.args(make.randn(0, 16))


@l2norm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x = draw.randn(rows, width)
        others = draw.by_torch(l2norm.reference)
        yield Point(size, draw.args(x), moved(x, x), alternatives=others)
