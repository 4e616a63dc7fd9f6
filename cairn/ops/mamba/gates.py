"""Decay and write strength of the gated delta rule from a token's projections."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import FLOATS, expect


def log_decay(a_log: Tensor, a: Tensor, dt_bias: Tensor, beta: float, threshold: float) -> Tensor:
    """-e^a_log * softplus(a + dt_bias) float32 of a [..., HV] or, a decay for each column,
    [..., HV, K]; softplus(x) = log(1 + e^(beta x)) / beta, and x where beta x > threshold."""
    x = a.float() + dt_bias.float()
    rate = a_log.float().exp()
    if dt_bias.dim() == 2:
        rate = rate.unsqueeze(-1)
    # Not torch's softplus: on a CPU its vectorised body and scalar tail round differently.
    soft = torch.log1p(torch.exp(beta * x)) / beta
    return -rate * torch.where(beta * x > threshold, x, soft)


def strength(b: Tensor) -> Tensor:
    """sigmoid(b) float32, with the same rounding at every position, unlike torch's vectorised
    sigmoid."""
    return 1 / (1 + torch.exp(-b.float()))


def expect_gates(op: str, a_log: Tensor, dt_bias: Tensor, heads: int, like: Tensor) -> None:
    """Raise BadArgument unless `A_log` and `dt_bias` are [heads]."""
    for name, given in (("A_log", a_log), ("dt_bias", dt_bias)):
        expect(op, name, given, (heads,), FLOATS, like)
