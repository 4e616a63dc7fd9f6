"""Heads normed, and their last dimensions rotated, or rotated back."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, check_dtype, expect, refuse
from cairn.ops.registry import op

NAME = "norm_rope_tail"


@op
def norm_rope_tail(
    x: Tensor,
    cos_sin: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    inverse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """rmsnorm of every head, then rotary embedding of its last dimensions, neighbours paired; in
    float32, rounded once at the end.

    Args:
        x: [T, H, D] float32, bfloat16 or float16; rows may be strided.
        cos_sin: [T, d] float32 = [cos | sin] of each token's angles, d <= D.
        weight: [D] of the norm, x's dtype or float32; None: 1.
        eps: added to the mean square; None: no norm.
        inverse: rotated by minus the angles.
        dtype: of the result; None: x's.
    Returns:
        [T, H, D], contiguous.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    y = x.float()
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    rotated = cos_sin.shape[1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    kept, tail = y.split((y.shape[2] - rotated, rotated), dim=-1)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((kept, turned), dim=-1).to(dtype or x.dtype)


@norm_rope_tail.check
def _(call: Call) -> None:
    expect(NAME, "x", call.x, 3, FLOATS)
    tokens, _, dim = call.x.shape
    expect(NAME, "cos_sin", call.cos_sin, (tokens, None), FLOAT32, call.x)
    width = call.cos_sin.shape[1]
    if width % 2 or width > dim:
        refuse(NAME, "cos_sin", f"has {width} columns, not an even number up to {dim}")
    if call.weight is not None:
        expect(NAME, "weight", call.weight, (dim,), (call.x.dtype, torch.float32), call.x)
        if call.eps is None:
            refuse(NAME, "weight", "is given, but no eps: without a norm there is no weight")
    check_dtype(NAME, call.dtype)
