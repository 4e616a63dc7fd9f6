"""The first half of a SwiGLU block: norm, two products and their gate."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.activation.silu_and_mul import gate_rows, in_lanes, silu_and_mul
from cairn.ops.call import Call
from cairn.ops.checks import expect, refuse
from cairn.ops.linear import skinny_gemm, skinny_gemm_cpu, skinny_gemm_panel, wgmma_launch
from cairn.ops.linear.checks import check_product
from cairn.ops.linear.linear import normed, normed_by_op
from cairn.ops.linear.skinny_gemm import Around
from cairn.ops.registry import op


@op
def gated_linear(
    input: Tensor, weight: Tensor, norm: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of x = rmsnorm(input), in float32, rounded once.

    Args:
        input: [T, K].
        weight: [2 N, K] = gate, then up; input's dtype.
        norm: [K], weight of the norm, input's dtype or float32; None: input as it is.
        eps: of the norm.
    Returns:
        [T, N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    product = torch.nn.functional.linear(normed(input, norm, eps), weight.float())
    return silu_and_mul.reference(product).to(input.dtype)


@gated_linear.check
def _(call: Call) -> None:
    expect("gated_linear", "input", call.input, 2)
    check_product("gated_linear", call.input, "weight", call.weight, None, call.norm)
    if call.weight.shape[0] % 2:
        refuse("gated_linear", "weight", f"has {call.weight.shape[0]} rows, no two equal halves")


def _blank(call: Call) -> Tensor:
    """Memory for the result."""
    shape = (call.input.shape[0], call.weight.shape[0] // 2)
    return gpu.empty(shape, call.input.dtype, call.input.device)


def _large_tiles(name: str, launch: ModuleType, **options: Any) -> None:
    @gated_linear.implementation(
        name,
        devices=gpu.DEVICES,
        when=lambda call: launch.accepts(call.input, call.weight, gated=True),
        replayed=True,
        **options,
    )
    def _(call: Call) -> Tensor:
        out = _blank(call)
        result: Tensor = launch.multiply(normed_by_op(call), call.weight, out, gated=True)
        return result


_large_tiles("gluon", wgmma_launch, **wgmma_launch.OPTIONS)
_large_tiles("triton_panel", skinny_gemm_panel)


@gated_linear.implementation(
    "triton_few",
    devices=gpu.DEVICES,
    when=lambda call: skinny_gemm.accepts(call.input, call.weight, gated=True),
    replayed=True,
)
def _(call: Call) -> Tensor:
    around = Around(norm=call.norm, eps=call.eps, gated=True)
    return skinny_gemm.multiply(call.input, call.weight, _blank(call), around)


@gated_linear.implementation(
    "numba",
    devices=cpu.DEVICES,
    when=lambda call: skinny_gemm_cpu.accepts(call.input, call.weight),
)
def _(call: Call) -> Tensor:
    around = Around(norm=call.norm, eps=call.eps, gated=True)
    return skinny_gemm_cpu.multiply(call.input, call.weight, _blank(call), around)


@gated_linear.implementation("halves", devices=cpu.DEVICES)
def _(call: Call) -> Tensor:
    """Norm, two products and their gate, each rounded.

    One product for both halves would be slower: the C library maps tensors above 32 MiB anew each
    time, page by page, which makes a product of 2,048 tokens with 2 x 4,096 outputs 1.5 times as
    slow.
    """
    x = normed_by_op(call)
    gate, up = (torch.nn.functional.linear(x, half) for half in call.weight.chunk(2))
    out = gate if in_lanes(gate) else torch.empty_like(gate)
    gate_rows(gate, up, 0, out)
    return out


@gated_linear.implementation("composed")
def _(call: Call) -> Tensor:
    """Norm, product and gate, each rounded."""
    return silu_and_mul(torch.nn.functional.linear(normed_by_op(call), call.weight))


gated_linear.tolerance(
    {torch.bfloat16: (2e-2, 3e-2)}, "normed tokens and products are rounded in between, or are not"
)
