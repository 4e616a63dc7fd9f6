"""The gate of a SwiGLU feed-forward layer whose inputs are limited (gpt-oss, DeepSeek-V4)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.activation import launch
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.registry import op

NAME = "silu_and_mul_clamp"


@op
def silu_and_mul_clamp(input: Tensor, limit: float) -> Tensor:
    """silu(min(a, limit)) * clamp(b, -limit, limit) of input = [a | b], in float32, rounded once.

    Args:
        input: [..., 2d] float32, bfloat16 or float16.
        limit: more than 0.
    Returns:
        [..., d] of input's dtype.
    Raises:
        BadArgument: for another shape, dtype or limit.
    """
    gates, ups = input.float().chunk(2, dim=-1)
    gated = torch.nn.functional.silu(gates.clamp(max=limit)) * ups.clamp(-limit, limit)
    return gated.to(input.dtype)


@silu_and_mul_clamp.check
def _(call: Call) -> None:
    expect(NAME, "input", call.input, dtypes=FLOATS)
    if not call.input.dim() or call.input.shape[-1] % 2:
        refuse(NAME, "input", f"has shape {list(call.input.shape)}, not [..., 2d]")
    if not call.limit > 0:
        refuse(NAME, "limit", f"is {call.limit}, not a number > 0")


@silu_and_mul_clamp.implementation(
    "triton", devices=gpu.DEVICES, when=launch.in_rows, replayed=True
)
def _(call: Call) -> Tensor:
    return launch.launch("silu", call.input, None, None, 1, gates=2, limit=call.limit)
