"""Linear layer, optionally with the norm before it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.call import Call
from cairn.ops.checks import check_dtype
from cairn.ops.linear import skinny_gemm, skinny_gemm_cpu, skinny_gemm_panel, wgmma_launch
from cairn.ops.linear.checks import check_product
from cairn.ops.linear.skinny_gemm import Around
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.registry import op


def normed(input: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """The input of the definition's product: float32, normed if there is a norm."""
    return input.float() if norm is None else rmsnorm.reference(input.float(), norm.float(), eps)


FEW_NUMBERS = 1 << 21
"""Largest weight (elements) that a CPU converts to float32 for a float32 result: a router's, but
not a vocabulary head's."""


@op
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """rmsnorm(input) @ weight.T + bias, in float32, rounded once.

    Args:
        input: [..., K].
        weight: [N, K], input's dtype.
        bias: [N], input's dtype, or None.
        norm: [K], weight of the norm, input's dtype or float32; None: input as it is.
        eps: of the norm.
        dtype: dtype of the result; None: input's.
    Returns:
        [..., N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    offset = None if bias is None else bias.float()
    product = torch.nn.functional.linear(normed(input, norm, eps), weight.float(), offset)
    return product.to(dtype or input.dtype)


@linear.check
def _(call: Call) -> None:
    check_product("linear", call.input, "weight", call.weight, call.bias, call.norm)
    check_dtype("linear", call.dtype)


def normed_by_op(call: Call) -> Tensor:
    """The input of a product after its norm, if it has one, rounded."""
    return call.input if call.norm is None else rmsnorm(call.input, call.norm, call.eps)


def _blank(call: Call) -> Tensor:
    """Memory for the result [..., N]."""
    shape = (*call.input.shape[:-1], call.weight.shape[0])
    return gpu.empty(shape, call.dtype or call.input.dtype, call.input.device)


def _large_tiles(name: str, launch: ModuleType, **options: Any) -> None:
    @linear.implementation(
        name,
        devices=gpu.DEVICES,
        when=lambda call: call.bias is None and launch.accepts(call.input, call.weight),
        replayed=True,
        **options,
    )
    def _(call: Call) -> Tensor:
        result: Tensor = launch.multiply(normed_by_op(call), call.weight, _blank(call))
        return result


_large_tiles("gluon", wgmma_launch, **wgmma_launch.OPTIONS)
_large_tiles("triton_panel", skinny_gemm_panel)


@linear.implementation(
    "triton_few",
    devices=gpu.DEVICES,
    when=lambda call: skinny_gemm.accepts(call.input, call.weight),
    replayed=True,
)
def _(call: Call) -> Tensor:
    around = Around(call.bias, call.norm, call.eps)
    return skinny_gemm.multiply(call.input, call.weight, _blank(call), around)


@linear.implementation(
    "numba",
    devices=cpu.DEVICES,
    when=lambda call: skinny_gemm_cpu.accepts(call.input, call.weight),
)
def _(call: Call) -> Tensor:
    around = Around(call.bias, call.norm, call.eps)
    return skinny_gemm_cpu.multiply(call.input, call.weight, _blank(call), around)


@linear.implementation("composed")
def _(call: Call) -> Tensor:
    """The norm, rounded; then the library's product, rounded where the result is not float32."""
    x = normed_by_op(call)
    if call.dtype == torch.float32 and x.dtype != call.dtype and call.bias is None and x.is_cuda:
        # A float32 result is not rounded to half precision in between: distinct logits would become
        # equal.
        wide = torch.mm(x.reshape(-1, x.shape[-1]), call.weight.t(), out_dtype=call.dtype)
        return wide.view(*x.shape[:-1], call.weight.shape[0])
    weight, bias = call.weight, call.bias
    if call.dtype == torch.float32 and weight.numel() <= FEW_NUMBERS and not x.is_cuda:
        # Library products round to the dtype of their operands.
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    product = torch.nn.functional.linear(x, weight, bias)
    return product if call.dtype is None else product.to(call.dtype)


linear.tolerance(
    {torch.bfloat16: (1.6e-2, 2e-2)}, "normed tokens are rounded before the product, or are not"
)
