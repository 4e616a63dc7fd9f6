"""Rows divided by their lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.norm.launch import LONGEST, divide_by_lengths
from cairn.ops.registry import op


@op
def l2norm(input: Tensor, eps: float = 1e-6) -> Tensor:
    """input * rsqrt(sum(input^2) + eps), in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        eps: added to the sum of squares, not to their mean.
    Raises:
        BadArgument: for another shape or dtype.
    """
    x = input.float()
    return (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + eps)).to(input.dtype)


@l2norm.check
def _(call: Call) -> None:
    expect("l2norm", "input", call.input, dtypes=FLOATS)
    if call.input.dim() == 0:
        refuse("l2norm", "input", "has shape [], not [..., H]")


@l2norm.implementation(
    "triton", devices=gpu.DEVICES, when=lambda call: call.input.shape[-1] <= LONGEST
)
def _(call: Call) -> Tensor:
    return divide_by_lengths(call.input, call.eps, mean=False)
