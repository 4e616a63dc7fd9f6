"""Residual addition and root mean square normalisation in one pass over the row."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, flashinfer, moved
from cairn.ops.norm.kernels import fused_add_rmsnorm_kernel
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op(mutates=("input", "residual"))
def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """residual becomes s = input + residual; input becomes rmsnorm(s). Both in place.

    The sum is taken in float32 and the norm sees it before it is rounded to residual's dtype.

    Args:
        input, residual: [..., H], same dtype.
        weight: [H], input's dtype or float32.
    """
    total = input.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    input.copy_(total * scale * weight.float())


def _rows(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> bool:
    """Rows of one stride with their numbers side by side, short enough for one program."""
    return (
        input.dim() == residual.dim() == 2
        and input.stride(-1) == residual.stride(-1) == 1
        and input.shape[-1] <= 1 << 15
    )


@fused_add_rmsnorm.implementation("triton", devices=gpu.DEVICES, when=_rows)
def _(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    rows, width = input.shape
    block = gpu.next_power_of_2(width)
    if rows:
        fused_add_rmsnorm_kernel[(rows,)](
            *(input, residual, weight, input.stride(0), residual.stride(0), width, eps, block),
            num_warps=gpu.warps_for(block),
        )


@fused_add_rmsnorm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(0, 16), make.randn(0, 16), make.randn(16))
    half = torch.bfloat16
    x, residual = make.randn(3, 65, dtype=half), make.randn(3, 65, dtype=half)
    yield make.args(x, residual, make.randn(65, dtype=half), eps=1e-5)
    x, residual = make.randn(4, 128, dtype=half)[:, :64], make.randn(4, 64, dtype=half)
    yield make.args(x, residual, make.randn(64))


@fused_add_rmsnorm.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x, residual = (draw.randn(rows, layer.hidden) for _ in range(2))
        weight = draw.randn(layer.hidden)
        others = (
            *draw.compiled(fused_add_rmsnorm.reference),
            *flashinfer("norm.fused_add_rmsnorm"),
        )
        size = f"{layer.name}: {rows} x {layer.hidden}"
        least = moved(x, x, residual, residual, weight)
        yield Point(size, draw.args(x, residual, weight), least, alternatives=others)
