"""RMS norm of heads, and rotation of their last dimensions by the angles or by minus the angles."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, check_dtype, expect, refuse
from cairn.ops.compress.kernels import norm_rope_tail_kernel
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op

NAME = "norm_rope_tail"
NUMBERS, WARPS = 4096, 4
"""Elements and warps per program."""


@op
def norm_rope_tail(
    x: Tensor,
    cos_sin: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    inverse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """rmsnorm of every head, then rotary embedding of its last d dimensions, 2i paired with 2i + 1;
    in float32, rounded once at the end.

    Args:
        x: [T, H, D] float32, bfloat16 or float16; rows may be strided.
        cos_sin: [T, d] float32 = [cos | sin] of each token's angles, d <= D.
        weight: [D] of the norm, x's dtype or float32; None: 1.
        eps: added to the mean square; None: no norm.
        inverse: rotated by minus the angles.
        dtype: dtype of the result; None: x's.
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
    tail = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((kept, tail), dim=-1).to(dtype or x.dtype)


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


@norm_rope_tail.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.x.stride(2) == 1
        and call.x.shape[2] % 2 == 0
        and gpu.within_32_bits(call.x)
        and call.cos_sin.stride(1) == 1
        and (call.weight is None or call.weight.is_contiguous())
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    tokens, heads, dim = call.x.shape
    out = gpu.empty(call.x.shape, call.dtype or call.x.dtype, call.x.device)
    if not tokens or not heads:
        return out
    padded = gpu.next_power_of_2(dim)
    at_once = max(1, min(gpu.next_power_of_2(heads), NUMBERS // padded))
    groups = -(-heads // at_once)
    pdl = uses_pdl(call.x.device, tokens, groups * WARPS)
    norm_rope_tail_kernel[(tokens * groups,)](
        x=call.x,
        cos_sin=call.cos_sin,
        weight=call.weight,
        out=out,
        x_stride=call.x.stride(0),
        head_stride=call.x.stride(1),
        angle_stride=call.cos_sin.stride(0),
        heads=heads,
        eps=0.0 if call.eps is None else call.eps,
        DIM=dim,
        DP=padded,
        ROTATED=call.cos_sin.shape[1],
        HEADS=at_once,
        GROUPS=groups,
        NORMED=call.eps is not None,
        INVERSE=call.inverse,
        PDL=pdl,
        num_warps=WARPS,
        **pdl_option(pdl),
    )
    return out
