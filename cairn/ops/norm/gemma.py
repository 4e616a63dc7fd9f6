"""Root mean square normalisation of the Gemma models, whose weights are stored less a constant.

Gemma 1 to 3 and Qwen3.5 store the weight less 1, Gemma 4 less a constant or no weight at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import refuse
from cairn.ops.norm.launch import (
    LONGEST,
    check_input,
    check_rows,
    divide_by_lengths,
    register_rows,
    register_sums,
)
from cairn.ops.registry import op


@op
def gemma_rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """input * rsqrt(mean(input^2) + eps) * (1 + weight), in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        eps: added to the mean square.
        out: [..., H] of input's dtype, written and returned if given; may be `input`.
        enable_pdl: ignored.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * (1 + weight.float())).to(input.dtype)


register_rows(gemma_rmsnorm, shifted=True)


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
        enable_pdl: ignored.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    total = input.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    input.copy_(total * scale * (1 + weight.float()))


register_sums(gemma_fused_add_rmsnorm, shifted=True)


@op
def gemma4_rmsnorm(
    input: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    scale_shift: float = 0.0,
    with_scale: bool = True,
) -> Tensor:
    """input * rsqrt(mean(input^2) + eps) * (weight + scale_shift), in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32; may be None where `with_scale` is false.
        eps: added to the mean square.
        scale_shift: added to the weight in float32.
        with_scale: false: the last factor is left out; `weight` and `scale_shift` are not read.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    if with_scale and weight is not None:
        x = x * (weight.float() + scale_shift)
    return x.to(input.dtype)


@gemma4_rmsnorm.check
def _(call: Call) -> None:
    if call.weight is not None:
        check_rows("gemma4_rmsnorm", call.input, call.weight)
    elif call.with_scale:
        refuse("gemma4_rmsnorm", "weight", "is None; with_scale=True needs one")
    else:
        check_input("gemma4_rmsnorm", call.input)


@gemma4_rmsnorm.implementation(
    "triton", devices=gpu.DEVICES, when=lambda call: call.input.shape[-1] <= LONGEST
)
def _(call: Call) -> Tensor:
    weight = call.weight if call.with_scale else None
    return divide_by_lengths(call.input, call.eps, True, weight, shift=call.scale_shift)
