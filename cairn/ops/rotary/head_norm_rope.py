"""RMS norm and rotary embedding of every head in one op, for use after a projection to heads."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect, refuse
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.rotary.kernels import head_norm_rope_kernel

WARPS = 4
"""Warps per program."""


def check_angles(op: str, cos_sin: Tensor | None, x: Tensor, dim: int) -> None:
    """Raise BadArgument unless the angles are [T, d] float32, d even, for x [T, ...], or None."""
    if cos_sin is not None:
        expect(op, "cos_sin", cos_sin, (x.shape[0], dim), FLOAT32, x)
        if dim % 2:
            refuse(op, "cos_sin", f"has {dim} columns, which are no pairs")


def rotated(heads: Tensor, cos_sin: Tensor | None) -> Tensor:
    """heads [T, H, d] float32 with the first rd elements of each rotated by [cos | sin] [T, rd],
    element i paired with i + rd / 2; None: unchanged."""
    if cos_sin is None:
        return heads
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[..., : cos_sin.shape[1]].chunk(2, dim=-1)
    rest = heads[..., cos_sin.shape[1] :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@op
def head_norm_rope(x: Tensor, weight: Tensor, cos_sin: Tensor | None, eps: float = 1e-6) -> Tensor:
    """rmsnorm of every head, then rotary embedding; in float32, rounded once at the end.

    Args:
        x: [T, H, d], tokens and heads may be strided.
        weight: [H, d], each head's norm weight, x's dtype or float32.
        cos_sin: [T, rd] float32 = [cos | sin] of each token's angles; the first rd <= d elements of
            a head are rotated, element i paired with i + rd / 2; None: no rotation.
    Returns:
        [T, H, d], contiguous.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps) * weight
    return rotated(y, cos_sin).to(x.dtype)


@head_norm_rope.check
def _(call: Call) -> None:
    name = "head_norm_rope"
    expect(name, "x", call.x, 3, FLOATS)
    expect(name, "weight", call.weight, call.x.shape[1:], (call.x.dtype, torch.float32), call.x)
    if call.cos_sin is not None and call.cos_sin.dim() == 2:
        width, dim = call.cos_sin.shape[1], call.x.shape[2]
        if width > dim:
            refuse(name, "cos_sin", f"has {width} columns, more than the {dim} numbers of a head")
        check_angles(name, call.cos_sin, call.x, width)
    else:
        check_angles(name, call.cos_sin, call.x, call.x.shape[2])


@head_norm_rope.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.x.stride(-1) == 1
        and call.x.shape[-1] % 2 == 0
        and gpu.within_32_bits(call.x)
        and call.weight.is_contiguous()
        and (call.cos_sin is None or call.cos_sin.is_contiguous())
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    tokens, heads, dim = call.x.shape
    out = gpu.empty(call.x.shape, call.x.dtype, call.x.device)
    half = (dim if call.cos_sin is None else call.cos_sin.shape[1]) // 2
    at_once = min(16, gpu.next_power_of_2(heads))
    groups = -(-heads // at_once)
    pdl = uses_pdl(call.x.device, tokens, groups * WARPS)
    if tokens:
        head_norm_rope_kernel[(tokens * groups,)](
            x=call.x,
            weight=call.weight,
            cos_sin=out if call.cos_sin is None else call.cos_sin,
            out=out,
            x_stride=call.x.stride(0),
            head_stride=call.x.stride(1),
            heads=heads,
            eps=call.eps,
            HALF=half,
            HP=gpu.next_power_of_2(half),
            REST=dim - 2 * half,
            RP=gpu.next_power_of_2(dim - 2 * half),
            GROUPS=groups,
            HEADS=at_once,
            ROTATED=call.cos_sin is not None,
            PDL=pdl,
            num_warps=WARPS,
            **pdl_option(pdl),
        )
    return out
