"""Writes to cache locations, of which some are skipped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def store(
    cache: Tensor,
    values: Tensor,
    location: Tensor,
    capacity: int,
    index_of: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    """Write values[t] to cache[index_of(location)[t]] where 0 <= location[t] < capacity.

    Without a host sync it is not known which tokens are skipped: a skipped token repeats the write
    of another token or, if all are skipped, rewrites what the cache holds.

    Args:
        cache: of any shape, changed.
        values: [T, n], the cache's dtype.
        location: [T] int64.
        capacity: number of locations of the cache.
        index_of: function from locations to an index, such that cache[index] is [T, n].
    """
    if not location.numel() or not capacity:
        return
    kept = (location >= 0) & (location < capacity)
    some = kept.int().argmax(dim=0, keepdim=True)
    token = torch.arange(len(location), device=location.device)
    source = torch.where(kept, token, some)
    index = index_of(location[source].clamp(0, capacity - 1))
    cache[index] = torch.where(kept.any(), values[source], cache[index])
