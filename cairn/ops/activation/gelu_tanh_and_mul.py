"""The gate of a GEGLU feed-forward layer, with gelu's approximation by tanh."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops.activation import launch
from cairn.ops.registry import op


@op
def gelu_tanh_and_mul(
    input: Tensor,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
    expert_ids: Tensor | None = None,
    expert_step: int = 1,
) -> Tensor:
    """gelu(input[..., :d]) * input[..., d:], in float32, rounded once.

    gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016,
    section 2).

    Args:
        input: [..., 2d] float32, bfloat16 or float16; rows may be strided.
        out: [..., d] of input's dtype, written and returned if given.
        enable_pdl: ignored.
        expert_ids: [n] int32 or int64; row r is left as it is in `out` (0 without `out`) where
            expert_ids[r // expert_step] is -1. None: every row is written.
        expert_step: rows of one entry of expert_ids.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return launch.gated(_gelu_tanh, input, out, expert_ids, expert_step)


def _gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh(z)) / 2 is the logistic function of 2z, which does not cancel far below zero.
    return x * torch.sigmoid(2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))


launch.register(gelu_tanh_and_mul, "gelu_tanh")
