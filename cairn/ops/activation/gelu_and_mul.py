"""The gate of a GEGLU feed-forward layer (Shazeer 2020, equation 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.activation import launch
from cairn.ops.registry import op


@op
def gelu_and_mul(
    input: Tensor,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
    expert_ids: Tensor | None = None,
    expert_step: int = 1,
) -> Tensor:
    """gelu(input[..., :d]) * input[..., d:], in float32, rounded once.

    gelu(x) = x (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel 2016, section 2), computed as
    x erfc(-x / sqrt(2)) / 2, which does not cancel far below zero.

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
    return launch.gated(_gelu, input, out, expert_ids, expert_step)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(x * -(0.5**0.5))


launch.register(gelu_and_mul, "gelu")
