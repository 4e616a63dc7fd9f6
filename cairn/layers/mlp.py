"""SwiGLU feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn.layers.linear import GatedLinear, Linear
from cairn.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """silu(W_gate x) * W_up x, with gate and up in one matrix; `down` is what it goes through then.

    Args:
        hidden: width of x.
        intermediate: width inside.
        dtype: of the parameters.
    """

    def __init__(self, hidden: int, intermediate: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = GatedLinear(hidden, intermediate, dtype=dtype)
        self.down = Linear(intermediate, hidden, dtype=dtype)

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [T, hidden], normed first if there is a norm, -> [T, intermediate]."""
        gated: Tensor = self.gate_up(x, norm)
        return gated
