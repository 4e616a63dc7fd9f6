"""Tables of tokens, and their embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops

ROWS_MULTIPLE = 64
"""The rows of a table are a multiple of it: else a library's product for many tokens takes twice as
long."""


class Table(nn.Module):
    """A row of numbers for each of some tokens.

    Args:
        rows: how many.
        hidden: width.
        dtype: of the numbers.

    Attributes:
        padding: rows at the end of `weight` that are no token's, all 0.
    """

    def __init__(self, rows: int, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.padding = -rows % ROWS_MULTIPLE
        table = torch.empty(rows + self.padding, hidden, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)


class Embedding(Table):
    """Of the user's tokens, V rows; the landmark, where the model has one, is in the row after.

    Args:
        rows, hidden, dtype: of the table.
        scale: rows are multiplied by it, rounded to the dtype.
    """

    def __init__(self, rows: int, hidden: int, *, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__(rows, hidden, dtype=dtype)
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, hidden]."""
        rows: Tensor = ops.take_rows(self.weight, ids)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)
