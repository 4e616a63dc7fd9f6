"""The summary of a page as the mean of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def mean_summary(k_cache: Tensor, pages: Tensor) -> Tensor:
    """Mean key of complete pages, all S slots counted.

    Args:
        k_cache: [pages, h_kv, S, d].
        pages: [N] int64, physical ids.
    Returns:
        [N, h_kv, d] in the cache's dtype; summed in float32, rounded once.
    """
    return k_cache.index_select(0, pages).float().mean(dim=2).to(k_cache.dtype)


@mean_summary.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        cache = make.randn(6, 2, 8, 16, dtype=dtype)
        cache[2] = torch.nan
        yield make.args(cache, make.tensor([5, 0, 3], torch.int64))
        yield make.args(cache, make.tensor([], torch.int64))
