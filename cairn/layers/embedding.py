"""Token embedding tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops

ROWS_MULTIPLE = 64
"""The number of rows of a table is padded to a multiple of this: otherwise the library's matrix
product for many tokens takes twice as long."""


class Table(nn.Module):
    """A table with one vector per token.

    Args:
        rows: how many.
        hidden: width.
        dtype: of the elements.

    Attributes:
        padding: rows at the end of `weight` that belong to no token, all 0.
    """

    def __init__(self, rows: int, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.padding = -rows % ROWS_MULTIPLE
        table = torch.empty(rows + self.padding, hidden, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)


class Embedding(Table):
    """The embedding of the V tokens of the vocabulary; the landmark's, if the model has one, is the
    row after them.

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
