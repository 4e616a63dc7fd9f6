"""Root mean square normalisation of what a gated delta net gives, and its gate."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, expect
from cairn.ops.norm.launch import check_rows
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def fused_rmsnorm_gated(input: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6) -> Tensor:
    """input * rsqrt(mean(input^2) + eps) * weight * silu(gate), in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        gate: [..., H] of any of these dtypes.
        eps: added to the mean square.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    gated = x * scale * weight.float() * torch.nn.functional.silu(gate.float())
    return gated.to(input.dtype)


@fused_rmsnorm_gated.check
def _(input: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6) -> None:
    check_rows("fused_rmsnorm_gated", input, weight)
    expect("fused_rmsnorm_gated", "gate", gate, input.shape, FLOATS, input)


@fused_rmsnorm_gated.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(96), make.randn(7, 96))
    half = torch.bfloat16
    x, gate = (make.randn(2, 3, 65, dtype=half) for _ in range(2))
    yield make.args(x, make.randn(65, dtype=half), gate, 1e-5)
    yield make.args(x[..., :40], make.randn(40), gate[..., :40].float())
    yield make.args(make.randn(0, 16), make.randn(16), make.randn(0, 16))


@fused_rmsnorm_gated.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight, gate = draw.randn(rows, width), draw.randn(width), draw.randn(rows, width)
        others = draw.by_torch(fused_rmsnorm_gated.reference)
        yield Point(size, draw.args(x, weight, gate), moved(x, x, gate), alternatives=others)
