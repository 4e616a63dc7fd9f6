"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, statistics in float32.

    Args:
        width: size of the last dimension.
        eps: added to the mean square.
        dtype: of the weight.
    """

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype; x may be a strided view."""
        return ops.rmsnorm(x, self.weight, self.eps)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [..., width] += what `forward` gives for x, in place."""
        ops.rmsnorm_add(x, residual, self.weight, self.eps)
