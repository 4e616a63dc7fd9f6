"""The gate of a SwiGLU feed-forward layer (Shazeer 2020, equation 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(input[..., :d]) * input[..., d:], in float32, rounded once.

    Args:
        input: [..., 2d].
        out: [..., d] of input's dtype, written and returned when given.
    """
    gate, up = input.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(input.dtype)


@silu_and_mul.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(7, 2 * 96))
    yield make.args(make.randn(1, 2 * 4097, dtype=torch.bfloat16))
    yield make.args(make.randn(2, 3, 2 * 5, dtype=torch.float16))
    yield make.args(make.randn(0, 8))
    yield make.args(make.randn(4, 64, scale=30.0)[:, :40], out=make.empty(4, 20))
