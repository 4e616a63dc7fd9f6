"""RMS norm of a gated delta net's output, times its gate."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.norm.launch import LONGEST, check_rows, divide_by_lengths
from cairn.ops.registry import op


@op
def fused_rmsnorm_gated(input: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6) -> Tensor:
    """input * rsqrt(mean(input^2) + eps) * weight * silu(gate), in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        gate: [..., H] of any of these dtypes.
        eps: added to the mean square.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    z = gate.float()
    # Not torch's silu: on a CPU its vectorised body and scalar tail round differently.
    return (x * scale * weight.float() * (z / (1 + torch.exp(-z)))).to(input.dtype)


@fused_rmsnorm_gated.check
def _(call: Call) -> None:
    check_rows("fused_rmsnorm_gated", call.input, call.weight)
    expect("fused_rmsnorm_gated", "gate", call.gate, call.input.shape, FLOATS, call.input)


@fused_rmsnorm_gated.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.input.shape[-1] <= LONGEST,
    replayed=True,
)
def _(call: Call) -> Tensor:
    return divide_by_lengths(call.input, call.eps, True, call.weight, call.gate)
