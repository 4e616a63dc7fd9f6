"""Residual addition and root mean square normalisation in one pass over the row."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.norm.launch import register_sums
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
        enable_pdl: ignored.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    total = input.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    input.copy_(total * scale * weight.float())


register_sums(fused_add_rmsnorm)
