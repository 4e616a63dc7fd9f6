"""Decay and write strength of the gated delta rule, for sequences that run in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.mamba.gates import expect_gates, log_decay, strength
from cairn.ops.mamba.kernels.split import gates_kernel
from cairn.ops.mamba.launch import in_order
from cairn.ops.registry import op

NAME = "fused_gdn_gating"
BLOCK = 1024


@op
def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """g = -e^A_log * softplus(a + dt_bias) and sigmoid(b), in float32.

    Args:
        A_log, dt_bias: [HV] float32, bfloat16 or float16.
        a, b: [T, HV] of any of these.
        beta, threshold: of softplus(x) = log(1 + e^(beta x)) / beta, which is x where beta x is
            larger than the threshold.
    Returns:
        g [1, T, HV] float32; sigmoid(b) [1, T, HV], rounded to b's dtype.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    g = log_decay(A_log, a, dt_bias, beta, threshold)
    return g.unsqueeze(0), strength(b).to(b.dtype).unsqueeze(0)


@fused_gdn_gating.check
def _(call: Call) -> None:
    expect(NAME, "a", call.a, 2, FLOATS)
    expect(NAME, "b", call.b, call.a.shape, FLOATS, call.a)
    expect_gates(NAME, call.A_log, call.dt_bias, call.a.shape[1], call.a)


@fused_gdn_gating.implementation("triton", devices=gpu.DEVICES)
def _(call: Call) -> tuple[Tensor, Tensor]:
    a, b = in_order(call.a, 1), in_order(call.b, 1)
    tokens, heads = a.shape
    g = gpu.empty((1, tokens, heads), torch.float32, a.device)
    strength = gpu.empty((1, tokens, heads), b.dtype, a.device)
    if g.numel():
        gates_kernel[(-(-g.numel() // BLOCK),)](
            a_log=call.A_log,
            a=a,
            b=b,
            dt_bias=call.dt_bias,
            g=g,
            strength=strength,
            elements=g.numel(),
            heads=heads,
            a_token=a.stride(0),
            b_token=b.stride(0),
            beta=call.beta,
            threshold=call.threshold,
            BLOCK=BLOCK,
        )
    return g, strength
