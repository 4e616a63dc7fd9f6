"""Scatter of rows by locations, as definitions do it."""

from __future__ import annotations

import torch
from torch import Tensor


def store_rows(buffer: Tensor, location: Tensor, rows: Tensor) -> None:
    """buffer[location] = rows, but for negative locations; the host does not look at them.

    Args:
        buffer: [slots, ...], changed.
        location: [T] integers.
        rows: [T, ...] of the same dtype.
    """
    if not len(location):
        return
    kept, at = location >= 0, location.long()
    # A row without a location repeats the first that has one; if none has, the buffer's first row.
    some, first = kept.any(), kept.int().argmax().view(1)
    place = torch.where(some, at.index_select(0, first), 0)
    row = torch.where(some, rows.index_select(0, first), buffer[:1])
    each = kept.view(-1, *(1,) * (rows.dim() - 1))
    buffer[torch.where(kept, at, place)] = torch.where(each, rows, row)
