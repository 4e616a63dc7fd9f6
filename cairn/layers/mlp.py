"""SwiGLU feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.linear import Linear


class GatedMLP(nn.Module):
    """W_down (silu(W_gate x) * W_up x), with gate and up in one matrix.

    Args:
        hidden: width of x.
        intermediate: width inside.
        dtype: of the parameters.
    """

    def __init__(self, hidden: int, intermediate: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, dtype=dtype)
        self.down = Linear(intermediate, hidden, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out: Tensor = self.down(ops.silu_and_mul(self.gate_up(x)))
        return out
