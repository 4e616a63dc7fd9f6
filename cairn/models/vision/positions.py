"""Positions of patches: rows and columns, learned positions, rotary angles."""

from __future__ import annotations

import torch
from torch import Tensor


def grid_positions(rows: int, columns: int, merge: int) -> Tensor:
    """[rows * columns, 2] int64: row and column of every patch of a grid, by squares of merge *
    merge patches."""
    row = torch.arange(rows).view(-1, merge, 1, 1)
    column = torch.arange(columns).view(1, 1, -1, merge)
    shape = rows // merge, merge, columns // merge, merge
    both = torch.stack((row.expand(shape), column.expand(shape)), dim=-1)
    return both.transpose(1, 2).reshape(-1, 2)


def interpolation(place: Tensor, grid: tuple[int, int], side: int) -> tuple[Tensor, Tensor]:
    """Where a table of side * side positions is read for patches at `place` [n, 2] of a grid.

    The corners of both coincide: row r of h rows reads at r * (side - 1) / (h - 1), bilinearly.

    Returns:
        [n, 4] int64 rows of the table, and [n, 4] float32 their weights.
    """
    whole, part = [], []
    for axis, size in enumerate(grid):
        at = torch.linspace(0, side - 1, size, dtype=torch.float32).to(place.device)[place[:, axis]]
        low = at.long()
        whole.append((low, (low + 1).clamp(max=side - 1)))
        part.append((1 - (at - low), at - low))
    index = [row * side + column for row in whole[0] for column in whole[1]]
    weight = [row * column for row in part[0] for column in part[1]]
    return torch.stack(index, dim=1), torch.stack(weight, dim=1)


def rotary_table(place: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [n, head_dim / 2] float32 of patches at `place` [n, 2]: one half of the angles is
    of the row, the other of the column."""
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    frequency = (1.0 / theta**exponent).to(place.device)
    angle = (place[:, :, None].float() * frequency).flatten(1)
    return angle.cos(), angle.sin()
