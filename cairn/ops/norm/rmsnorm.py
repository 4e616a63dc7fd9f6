"""Root mean square normalisation (Zhang and Sennrich 2019, equation 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Alternative, Draw, Point, Points, flashinfer, moved
from cairn.ops.norm.kernels import rmsnorm_kernel
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """input * rsqrt(mean(input^2) + eps) * weight, in float32, rounded once.

    Args:
        input: [..., H], any dtype, any strides.
        weight: [H], input's dtype or float32.
        out: [..., H] written and returned when given; may be `input`.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * weight.float()).to(input.dtype)


def _same_dtype(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None
) -> bool:
    return input.dtype == weight.dtype


@rmsnorm.implementation("torch", devices=("cpu",), when=_same_dtype)
def _(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """The same operations from C++: one call instead of seven, which few rows notice."""
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def _rows(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> bool:
    """Rows with their numbers side by side, short enough for one program."""
    return input.stride(-1) == 1 and input.shape[-1] <= 1 << 15


@rmsnorm.implementation("triton", devices=gpu.DEVICES, when=_rows)
def _(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    width = input.shape[-1]
    x = input.reshape(-1, width)
    result = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    block = gpu.next_power_of_2(width)
    if x.shape[0]:
        rmsnorm_kernel[(x.shape[0],)](
            x, weight, result, x.stride(0), width, width, eps, block, num_warps=gpu.warps_for(block)
        )
    return result


@rmsnorm.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(1, 4097), make.randn(4097), 1e-5)
    yield make.args(make.randn(0, 16), make.randn(16))
    half = torch.bfloat16
    yield make.args(make.randn(2, 3, 65, dtype=half), make.randn(65, dtype=half), eps=1e-5)
    yield make.args(make.randn(5, 128, dtype=half)[:, :64], make.randn(64))
    yield make.args(make.randn(3, 64, dtype=torch.float16), make.randn(64, dtype=torch.float16))
    yield make.args(make.full((2, 8), 0.0), make.randn(8), out=make.empty(2, 8))


@rmsnorm.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x, weight = draw.randn(rows, layer.hidden), draw.randn(layer.hidden)
        others = (
            Alternative("rms_norm", lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)),
            *draw.compiled(rmsnorm.reference),
            *flashinfer("norm.rmsnorm"),
        )
        size = f"{layer.name}: {rows} x {layer.hidden}"
        yield Point(size, draw.args(x, weight), moved(x, x, weight), alternatives=others)
