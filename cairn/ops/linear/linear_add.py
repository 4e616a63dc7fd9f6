"""Linear layer whose output is added to a residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect
from cairn.ops.linear import skinny_gemm, skinny_gemm_cpu, skinny_gemm_panel, wgmma_launch
from cairn.ops.linear.checks import check_product
from cairn.ops.linear.skinny_gemm import Around
from cairn.ops.registry import op


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
    skinny_gemm.multiply(call.input, call.weight, call.residual, Around(call.bias, add=True))


@linear_add.implementation(
    "gluon",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.bias is None
        and call.residual.stride(1) == 1
        and wgmma_launch.accepts_added(call.input, call.weight)
    ),
    replayed=True,
    **wgmma_launch.OPTIONS,
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
    skinny_gemm_cpu.multiply(call.input, call.weight, call.residual, Around(call.bias, add=True))


@linear_add.implementation("torch")
def _(call: Call) -> None:
    """One library product with accumulation."""
    residual = call.residual
    residual.addmm_(call.input, call.weight.t())
    if call.bias is not None:
        residual += call.bias
