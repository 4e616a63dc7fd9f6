"""Root mean square normalisation as Gemma and Qwen3.5 store its weight: less 1."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.norm.launch import register_rows
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
        out: [..., H] of input's dtype, written and returned when given; may be `input`.
        enable_pdl: without effect.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * (1 + weight.float())).to(input.dtype)


register_rows(gemma_rmsnorm, shifted=True)
