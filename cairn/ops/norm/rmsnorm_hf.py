"""Root mean square normalisation with Hugging Face's two roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.norm.launch import LONGEST, check_rows, norm_rows
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def rmsnorm_hf(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """input * rsqrt(mean(input^2) + eps), rounded to input's dtype, then * weight, rounded again.

    As the models of Hugging Face's transformers compute it: what is to agree with them to the last
    bit takes this one.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        eps: added to the mean square.
        out: [..., H] of input's dtype, written and returned when given; may be `input`.
        enable_pdl: without effect.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return ((x * scale).to(input.dtype).float() * weight.float()).to(input.dtype)


@rmsnorm_hf.check
def _(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> None:
    check_rows("rmsnorm_hf", input, weight, out)


def _rows(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> bool:
    """Rows with their numbers side by side, short enough for one program."""
    return input.stride(-1) == 1 and input.shape[-1] <= LONGEST


@rmsnorm_hf.implementation("triton", devices=gpu.DEVICES, when=_rows)
def _(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    return norm_rows(input, weight, eps, out, rounded=True)


@rmsnorm_hf.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(1, 4097), make.randn(4097), 1e-5)
    yield make.args(make.randn(0, 16), make.randn(16))
    half = torch.bfloat16
    yield make.args(make.randn(2, 3, 65, dtype=half), make.randn(65, dtype=half), eps=1e-5)
    yield make.args(make.randn(5, 128, dtype=half)[:, :64], make.randn(64))
    yield make.args(make.randn(3, 64, dtype=torch.float16), make.randn(64, dtype=torch.float16))
    yield make.args(make.full((2, 8), 0.0), make.randn(8), out=make.empty(2, 8))
    yield make.args(make.randn(63), make.randn(63), out=make.empty(63, 2)[:, 0])


@rmsnorm_hf.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight = draw.randn(rows, width), draw.randn(width)
        others = (*draw.compiled(rmsnorm_hf.reference),)
        yield Point(size, draw.args(x, weight), moved(x, x, weight), alternatives=others)
