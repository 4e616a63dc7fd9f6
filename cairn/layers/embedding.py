"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops


class Embedding(nn.Module):
    """Table of the user's tokens, with the landmark (where the model has one) in the row after.

    Args:
        rows: V, or V + 1 with a landmark.
        hidden: width.
        dtype: of the table.
    """

    def __init__(self, rows: int, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, hidden]."""
        rows: Tensor = ops.take_rows(self.weight, ids)
        return rows
