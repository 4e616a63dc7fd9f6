"""Root mean square normalisation with Hugging Face's two roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.norm.launch import register_rows
from cairn.ops.registry import op


@op
def rmsnorm_hf(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """input * rsqrt(mean(input^2) + eps), rounded to input's dtype, then * weight, rounded again.

    This is the order of roundings in Hugging Face's transformers; needed to agree with it bit for
    bit.

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
    return ((x * scale).to(input.dtype).float() * weight.float()).to(input.dtype)


register_rows(rmsnorm_hf, rounded=True)
