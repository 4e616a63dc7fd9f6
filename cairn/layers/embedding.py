"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops

ROWS_MULTIPLE = 64
"""Tables have so many rows, or twice as many, ...: with another number a library's product for many
tokens takes twice as long."""


def padded(rows: int) -> int:
    """Rows of a table of at least `rows`."""
    return -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE


class Embedding(nn.Module):
    """Table of the user's tokens, with the landmark (where the model has one) in the row after.

    Args:
        rows: V, or V + 1 with a landmark.
        hidden: width.
        dtype: of the table.

    Attributes:
        padding: rows at the end of `weight` that are no token's, all 0.
    """

    def __init__(self, rows: int, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.padding = padded(rows) - rows
        table = torch.empty(padded(rows), hidden, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, hidden]."""
        rows: Tensor = ops.take_rows(self.weight, ids)
        return rows
