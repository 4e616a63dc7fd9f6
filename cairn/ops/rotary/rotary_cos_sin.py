"""The angles of rotary position embedding (Su et al. 2021, equation 15) for one step."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, INDICES, expect
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.rotary.kernels import cos_sin_kernel

AT_ONCE, WARPS = 128, 4
"""Angles per program, and its warps: one angle per thread, because sin and cos of large angles take
long."""


@op
def rotary_cos_sin(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """[cos(a) | sin(a)] with a = positions * inv_freq, both factors and the product in float32.

    Args:
        positions: [T] int32 or int64.
        inv_freq: [d / 2] float32, radians per position.
    Returns:
        [T, d] float32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    angle = positions.float()[:, None] * inv_freq.float()
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@rotary_cos_sin.check
def _(call: Call) -> None:
    expect("rotary_cos_sin", "positions", call.positions, 1, INDICES)
    expect("rotary_cos_sin", "inv_freq", call.inv_freq, 1, FLOAT32, call.positions)


@rotary_cos_sin.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.positions.is_contiguous() and call.inv_freq.is_contiguous(),
    replayed=True,
)
def _(call: Call) -> Tensor:
    tokens, half = call.positions.numel(), call.inv_freq.numel()
    out = gpu.empty((tokens, 2 * half), torch.float32, call.positions.device)
    if tokens:
        programs = -(-tokens * half // AT_ONCE)
        pdl = uses_pdl(call.positions.device, tokens, -(-half // AT_ONCE) * WARPS)
        cos_sin_kernel[(programs,)](
            positions=call.positions,
            inv_freq=call.inv_freq,
            out=out,
            elements=tokens * half,
            HALF=half,
            BLOCK=AT_ONCE,
            PDL=pdl,
            num_warps=WARPS,
            **pdl_option(pdl),
        )
    return out
