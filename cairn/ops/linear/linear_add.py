"""A product of tokens with a weight that is added to a residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.call import Call
from cairn.ops.checks import expect
from cairn.ops.linear import skinny_gemm, skinny_gemm_cpu, skinny_gemm_panel, wgmma_launch
from cairn.ops.linear.checks import check_product
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op(mutates=("residual",))
def linear_add(input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """residual += input @ weight.T + bias, in float32, rounded once.

    Args:
        input: [T, K].
        residual: [T, N], input's dtype, changed.
        weight: [N, K], input's dtype.
        bias: [N], input's dtype, or None.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    offset = None if bias is None else bias.float()
    product = torch.nn.functional.linear(input.float(), weight.float(), offset)
    residual.copy_(residual.float() + product)


@linear_add.check
def _(call: Call) -> None:
    expect("linear_add", "input", call.input, 2)
    check_product("linear_add", call.input, "weight", call.weight, call.bias)
    shape = (call.input.shape[0], call.weight.shape[0])
    expect("linear_add", "residual", call.residual, shape, (call.input.dtype,), call.input)


@linear_add.implementation(
    "triton_few",
    devices=gpu.DEVICES,
    when=lambda call: (
        skinny_gemm.accepts(call.input, call.weight, add=True) and call.residual.stride(1) == 1
    ),
    replayed=True,
)
def _(call: Call) -> None:
    skinny_gemm.multiply(call.input, call.weight, call.residual, call.bias, add=True)


@linear_add.implementation(
    "gluon",
    devices=gpu.DEVICES,
    dtypes=(torch.bfloat16, torch.float16),
    when=lambda call: (
        call.bias is None
        and call.residual.stride(1) == 1
        and wgmma_launch.accepts_added(call.input, call.weight)
    ),
    missing="" if gpu.gl else "needs Triton 3.6",
    replayed=True,
)
def _(call: Call) -> None:
    skinny_gemm_panel.add(wgmma_launch.multiply_parts(call.input, call.weight), call.residual)


@linear_add.implementation(
    "numba",
    devices=cpu.DEVICES,
    when=lambda call: (
        skinny_gemm_cpu.accepts(call.input, call.weight) and call.residual.is_contiguous()
    ),
)
def _(call: Call) -> None:
    skinny_gemm_cpu.multiply(call.input, call.weight, call.residual, call.bias, add=True)


@linear_add.implementation("torch")
def _(call: Call) -> None:
    """One product of the library, which adds to what is there."""
    residual = call.residual
    residual.addmm_(call.input, call.weight.t())
    if call.bias is not None:
        residual += call.bias


@linear_add.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width, numbers in ((1, 64, 9), (2, 48, 33), (5, 96, 20), (70, 48, 5)):
            weight = make.randn(numbers, width, dtype=dtype, scale=width**-0.5)
            x = make.randn(rows, width, dtype=dtype)
            residual = make.randn(rows, numbers, dtype=dtype)
            yield make.args(x, residual, weight)
            yield make.args(x, residual, weight, make.randn(numbers, dtype=dtype))
    yield make.args(make.randn(3, 128)[:, :64], make.randn(3, 20)[:, 3:12], make.randn(9, 64))
    yield make.args(make.randn(0, 64), make.randn(0, 9), make.randn(9, 64))
    if make.device != "cpu":
        # So large that a GPU streams it.
        weight = make.randn(1000, 8400, dtype=torch.bfloat16, scale=0.01)
        x, residual = (make.randn(19, n, dtype=torch.bfloat16) for n in (8400, 1000))
        yield make.args(x, residual, weight)


def _by_torch(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    residual.addmm_(x, weight.t())


@linear_add.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        for name, width in (("out", layer.heads * layer.head_dim), ("down", layer.intermediate)):
            x, residual = draw.randn(rows, width), draw.randn(rows, layer.hidden)
            weight = draw.randn(layer.hidden, width, scale=width**-0.5)
            yield Point(
                f"{layer.name} {name}: {rows} x {width} x {layer.hidden}",
                draw.args(x, residual, weight),
                moved(x, weight, residual, residual),
                2.0 * rows * weight.numel(),
                draw.by_torch(_by_torch, "addmm_"),
            )
