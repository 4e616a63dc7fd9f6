"""Residual addition and Gemma's root mean square normalisation in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, flashinfer, moved
from cairn.ops.norm.launch import check_sum, norm_sums, rows_of
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op(mutates=("input", "residual"))
def gemma_fused_add_rmsnorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """residual becomes s = input + residual; input becomes gemma_rmsnorm(s). Both in place.

    The sum is taken in float32 and the norm sees it before it is rounded to residual's dtype.

    Args:
        input, residual: [..., H], same dtype, float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        eps: added to the mean square.
        enable_pdl: without effect.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    total = input.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    input.copy_(total * scale * (1 + weight.float()))


@gemma_fused_add_rmsnorm.check
def _(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    check_sum("gemma_fused_add_rmsnorm", input, residual, weight)


def _rows(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> bool:
    return rows_of(input) is not None and rows_of(residual) is not None


@gemma_fused_add_rmsnorm.implementation("triton", devices=gpu.DEVICES, when=_rows)
def _(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    norm_sums(input, residual, weight, eps, shifted=True)


@gemma_fused_add_rmsnorm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(0, 16), make.randn(0, 16), make.randn(16))
    yield make.args(make.randn(2, 3, 8), make.randn(2, 3, 8), make.randn(8))
    half = torch.bfloat16
    x, residual = make.randn(3, 65, dtype=half), make.randn(3, 65, dtype=half)
    yield make.args(x, residual, make.randn(65, dtype=half), eps=1e-5)
    x, residual = make.randn(4, 128, dtype=half)[:, :64], make.randn(4, 64, dtype=half)
    yield make.args(x, residual, make.randn(64))


@gemma_fused_add_rmsnorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, residual = (draw.randn(rows, width) for _ in range(2))
        weight = draw.randn(width)
        others = (
            *draw.compiled(gemma_fused_add_rmsnorm.reference),
            *flashinfer("norm.gemma_fused_add_rmsnorm"),
        )
        least = moved(x, x, residual, residual, weight)
        yield Point(size, draw.args(x, residual, weight), least, alternatives=others)
