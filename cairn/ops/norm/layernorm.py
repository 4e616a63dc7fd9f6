"""Layer normalisation (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.norm.launch import check_rows, check_weight
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def layernorm(input: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """(input - mean) * rsqrt(variance + eps) * weight + bias, in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        bias: as weight, or None.
        eps: added to the variance, which is the mean square of the distance from the mean.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    shift = None if bias is None else bias.float()
    x = torch.nn.functional.layer_norm(input.float(), weight.shape, weight.float(), shift, eps)
    return x.to(input.dtype)


@layernorm.check
def _(input: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-6) -> None:
    check_rows("layernorm", input, weight)
    if bias is not None:
        check_weight("layernorm", "bias", bias, input)


@layernorm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(96), make.randn(96))
    half = torch.bfloat16
    weight, bias = make.randn(65, dtype=half), make.randn(65, dtype=half)
    yield make.args(make.randn(2, 3, 65, dtype=half), weight, bias, 1e-5)
    yield make.args(make.randn(5, 128, dtype=half)[:, :64], make.randn(64), None)
    yield make.args(make.randn(0, 16), make.randn(16), make.randn(16))


@layernorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight, bias = draw.randn(rows, width), draw.randn(width), draw.randn(width)
        others = draw.by_torch(layernorm.reference)
        yield Point(
            size, draw.args(x, weight, bias), moved(x, x, weight, bias), alternatives=others
        )
