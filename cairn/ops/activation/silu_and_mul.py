"""The gate of a SwiGLU feed-forward layer (Shazeer 2020, equation 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.activation.kernels import silu_and_mul_kernel
from cairn.ops.benching import Draw, Point, Points, flashinfer, moved
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(input[..., :d]) * input[..., d:], in float32, rounded once.

    Args:
        input: [..., 2d].
        out: [..., d] of input's dtype, written and returned when given.
    """
    gate, up = input.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(input.dtype)


@silu_and_mul.implementation(
    "triton", devices=gpu.DEVICES, when=lambda input, out=None: input.stride(-1) == 1
)
def _(input: Tensor, out: Tensor | None = None) -> Tensor:
    width = input.shape[-1] // 2
    x = input.reshape(-1, 2 * width)
    shape = (*input.shape[:-1], width)
    result = torch.empty(shape, dtype=input.dtype, device=input.device)
    block = min(1024, gpu.next_power_of_2(max(1, width)))
    if x.shape[0]:
        silu_and_mul_kernel[(x.shape[0], -(-width // block))](
            x, result, x.stride(0), width, block, num_warps=4
        )
    return result


@silu_and_mul.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 2 * 96))
    yield make.args(make.randn(1, 2 * 4097, dtype=torch.bfloat16))
    yield make.args(make.randn(2, 3, 2 * 5, dtype=torch.float16))
    yield make.args(make.randn(0, 8))
    yield make.args(make.randn(4, 64, scale=30.0)[:, :40], out=make.empty(4, 20))


@silu_and_mul.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        x = draw.randn(rows, 2 * layer.intermediate)
        others = (
            *draw.compiled(silu_and_mul.reference),
            *flashinfer("activation.silu_and_mul"),
        )
        size = f"{layer.name}: {rows} x {layer.intermediate}"
        yield Point(size, draw.args(x), moved(x) * 3 // 2, alternatives=others)
