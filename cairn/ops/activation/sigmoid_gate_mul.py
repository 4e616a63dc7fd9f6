"""The gate of gated attention (Qiu et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.activation.kernels import sigmoid_gate_kernel
from cairn.ops.activation.launch import BLOCK, WARPS
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

NAME = "sigmoid_gate_mul"


@op
def sigmoid_gate_mul(input: Tensor, gate: Tensor) -> Tensor:
    """input * sigmoid(gate), in float32, rounded once.

    Args:
        input: [T, H, d] float32, bfloat16 or float16.
        gate: [T, H, d] of input's dtype; tokens and heads may be strided.
    Returns:
        [T, H, d] of input's dtype, contiguous.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return (input.float() * torch.sigmoid(gate.float())).to(input.dtype).contiguous()


@sigmoid_gate_mul.check
def _(call: Call) -> None:
    expect(NAME, "input", call.input, 3, FLOATS)
    expect(NAME, "gate", call.gate, call.input.shape, (call.input.dtype,), call.input)


@sigmoid_gate_mul.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.input.stride(2) == call.gate.stride(2) == 1
        and gpu.within_32_bits(call.input)
        and gpu.within_32_bits(call.gate)
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    tokens, heads, dim = call.input.shape
    out = gpu.empty(call.input.shape, call.input.dtype, call.input.device)
    width = heads * dim
    if not out.numel():
        return out
    block = min(BLOCK, gpu.next_power_of_2(width))
    blocks = -(-width // block)
    sigmoid_gate_kernel[(tokens * blocks,)](
        x=call.input,
        gate=call.gate,
        out=out,
        x_token=call.input.stride(0),
        x_head=call.input.stride(1),
        gate_token=call.gate.stride(0),
        gate_head=call.gate.stride(1),
        width=width,
        DIM=dim,
        BLOCKS=blocks,
        BLOCK=block,
        PDL=uses_pdl(out.device, tokens, blocks * WARPS),
        num_warps=WARPS,
    )
    return out
