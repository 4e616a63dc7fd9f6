"""Sinusoidal embeddings of diffusion steps (Ho, Jain and Abbeel 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.registry import op

NAME = "timestep_embedding"
STEPS = (*FLOATS, torch.int32, torch.int64)


@op
def timestep_embedding(
    t: Tensor,
    dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 0.0,
    scale: float = 1.0,
    max_period: int = 10000,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[sin(a) | cos(a)], a_i = scale * t * exp(-ln(max_period) * i / (h - downscale_freq_shift))
    for i < h = dim // 2, in float32, rounded once; an odd last number is 0.

    Args:
        t: [n] float32, bfloat16, float16, int32 or int64.
        dim: of the result, 2 or more.
        flip_sin_to_cos: the cosines come first.
        downscale_freq_shift: less than h.
        scale: of the angles.
        max_period: more than 0.
        dtype: dtype of the result: float32, bfloat16 or float16.
    Returns:
        [n, dim].
    Raises:
        BadArgument: for another shape, dtype, device or number.
    """
    half = dim // 2
    step = torch.arange(half, dtype=torch.float32, device=t.device)
    factor = torch.exp(step * (-math.log(max_period) / (half - downscale_freq_shift)))
    angle = t.float().unsqueeze(1) * factor * scale
    parts = [angle.sin(), angle.cos()]
    found = torch.cat(parts[::-1] if flip_sin_to_cos else parts, dim=1)
    return torch.nn.functional.pad(found, (0, dim % 2)).to(dtype)


@timestep_embedding.check
def _(call: Call) -> None:
    expect(NAME, "t", call.t, 1, STEPS)
    if call.dim < 2:
        refuse(NAME, "dim", f"is {call.dim}, not 2 or more")
    if not call.downscale_freq_shift < call.dim // 2:
        refuse(NAME, "downscale_freq_shift", f"is {call.downscale_freq_shift}, not below dim / 2")
    if not call.max_period > 0:
        refuse(NAME, "max_period", f"is {call.max_period}, not more than 0")
    if call.dtype not in FLOATS:
        refuse(NAME, "dtype", f"is {call.dtype}, not float32, bfloat16 or float16")
