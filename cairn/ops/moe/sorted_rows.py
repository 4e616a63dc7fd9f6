"""Helpers for definitions on rows sorted by expert that do not read sizes on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def owners(offsets: Tensor, counts: Tensor, rows: int) -> Tensor:
    """[rows] int64: the expert of each row, or -1.

    Args:
        offsets: [E] or [E + 1], the first row of each expert, ascending.
        counts: [E], number of rows of each expert.
    """
    experts = counts.shape[0]
    row = torch.arange(rows, device=counts.device)
    if not experts:
        return torch.full_like(row, -1)
    first = offsets[:experts].long()
    expert = torch.searchsorted(first, row, right=True) - 1
    at = expert.clamp(min=0)
    owned = (expert >= 0) & (row < first[at] + counts.long()[at])
    return torch.where(owned, expert, -1)


def products(
    out: Tensor, x: Tensor, owner: Tensor, matrix: Callable[[int], Tensor], experts: int
) -> Tensor:
    """out [R, N] with each expert's rows replaced by those of x [R, K] float32 times matrix(expert)
    [K, N], rounded once."""
    for expert in range(experts):
        own = (owner == expert).unsqueeze(1)
        out = torch.where(own, (x @ matrix(expert)).to(out.dtype), out)
    return out


def experts_of(order: Tensor, experts: Tensor, used: Tensor, block: int, pairs: int) -> Tensor:
    """[pairs] int64: the expert of each pair, or -1; see `moe_align_block_size`."""
    owner = experts.long().repeat_interleave(block)
    count = min(owner.shape[0], order.shape[0])
    pair, owner = order[:count].long(), owner[:count]
    own = (torch.arange(count, device=order.device) < used) & (pair >= 0) & (pair < pairs)
    found = torch.full((pairs + 1,), -1, dtype=torch.int64, device=order.device)
    # Padding rows are written to an extra last entry.
    return found.scatter_(0, torch.where(own, pair, pairs), owner)[:pairs]
