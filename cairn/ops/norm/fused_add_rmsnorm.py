"""Residual addition and root mean square normalisation in one pass over the row."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.norm.launch import both_in_rows, check_sum, norm_sums
from cairn.ops.registry import op


@op(mutates=("input", "residual"))
def fused_add_rmsnorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """residual becomes s = input + residual; input becomes rmsnorm(s). Both in place.

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
    input.copy_(total * scale * weight.float())


@fused_add_rmsnorm.check
def _(call: Call) -> None:
    check_sum("fused_add_rmsnorm", call.input, call.residual, call.weight)


@fused_add_rmsnorm.implementation("triton", devices=gpu.DEVICES, when=both_in_rows, replayed=True)
def _(call: Call) -> None:
    norm_sums(call.input, call.residual, call.weight, call.eps, shifted=False)
