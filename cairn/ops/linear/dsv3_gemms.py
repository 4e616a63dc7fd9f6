"""Two projections of DeepSeek-V3, under sgl-kernel's names."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.linear.linear import linear
from cairn.ops.registry import op


@op(aliases={"output": "out"})
def dsv3_fused_a_gemm(mat_a: Tensor, mat_b: Tensor, out: Tensor | None = None) -> Tensor:
    """mat_a @ mat_b, in float32, rounded once: the projections q_a and kv_a in one product.

    Args:
        mat_a: [M, K] float32, bfloat16 or float16.
        mat_b: [K, N] of its dtype, column-major.
        out: [M, N] of its dtype, written and returned if given; sgl-kernel also calls it `output`.
    Returns:
        [M, N] of mat_a's dtype.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return (mat_a.float() @ mat_b.float()).to(mat_a.dtype)


@op
def dsv3_router_gemm(
    hidden_states: Tensor, router_weights: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """hidden_states @ router_weights.T, in float32, rounded once: the router's logits.

    Args:
        hidden_states: [M, K] float32, bfloat16 or float16.
        router_weights: [E, K] of its dtype.
        out_dtype: float32, bfloat16 or float16.
    Returns:
        [M, E].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return (hidden_states.float() @ router_weights.float().t()).to(out_dtype)


@dsv3_fused_a_gemm.check
def _(call: Call) -> None:
    name, a = "dsv3_fused_a_gemm", call.mat_a
    expect(name, "mat_a", a, 2, FLOATS)
    expect(name, "mat_b", call.mat_b, (a.shape[1], None), (a.dtype,), a)
    if call.out is not None:
        expect(name, "out", call.out, (a.shape[0], call.mat_b.shape[1]), (a.dtype,), a)


@dsv3_router_gemm.check
def _(call: Call) -> None:
    name, x = "dsv3_router_gemm", call.hidden_states
    expect(name, "hidden_states", x, 2, FLOATS)
    expect(name, "router_weights", call.router_weights, (None, x.shape[1]), (x.dtype,), x)
    if call.out_dtype not in FLOATS:
        refuse(name, "out_dtype", f"is {call.out_dtype}, not float32, bfloat16 or float16")


@dsv3_fused_a_gemm.implementation(
    "linear",
    devices=("cuda",) if gpu.AVAILABLE else (),
    when=lambda call: call.mat_b.t().is_contiguous(),
    replayed=True,
)
def _(call: Call) -> Tensor:
    return linear(call.mat_a, call.mat_b.t())


@dsv3_router_gemm.implementation(
    "linear", devices=("cuda",) if gpu.AVAILABLE else (), replayed=True
)
def _(call: Call) -> Tensor:
    return linear(call.hidden_states, call.router_weights, dtype=call.out_dtype)
