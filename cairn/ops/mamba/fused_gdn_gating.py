"""Decay and strength of the gated delta rule, for sequences that run in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, expect
from cairn.ops.mamba.gates import expect_gates, log_decay
from cairn.ops.mamba.sizes import net_of
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

NAME = "fused_gdn_gating"


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
    return g.unsqueeze(0), b.float().sigmoid().to(b.dtype).unsqueeze(0)


@fused_gdn_gating.check
def _(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> None:
    expect(NAME, "a", a, 2, FLOATS)
    expect(NAME, "b", b, a.shape, FLOATS, a)
    expect_gates(NAME, A_log, dt_bias, a.shape[1], a)


@fused_gdn_gating.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (make.randn(7, 6, dtype=dtype, scale=4.0) for _ in range(2))
        yield make.args(make.randn(6), a, b, make.randn(6, dtype=dtype))
    yield make.args(make.randn(6), a, b, make.randn(6), 0.5, 1.0)
    yield make.args(make.randn(6), a[:0], b[:0], make.randn(6))


@fused_gdn_gating.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for tokens in net.prefills:
        a, b = (draw.randn(tokens, net.value_heads) for _ in range(2))
        rate, bias = (draw.randn(net.value_heads) for _ in range(2))
        size = f"{tokens} x {net.value_heads}"
        yield Point(size, draw.args(rate, a, b, bias), moved(a, a, b, b))
