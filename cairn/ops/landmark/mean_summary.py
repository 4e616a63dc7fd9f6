"""The summary of a page as the mean of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.landmark.kernels.summary import mean_summary_kernel
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


@mean_summary.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda k_cache, pages: k_cache.stride()[2:] == (k_cache.shape[3], 1),
)
def _(k_cache: Tensor, pages: Tensor) -> Tensor:
    heads, size, dim = k_cache.shape[1:]
    key = torch.empty((pages.numel(), heads, dim), dtype=k_cache.dtype, device=k_cache.device)
    if pages.numel():
        mean_summary_kernel[(pages.numel(), heads)](
            *(k_cache, pages, key, *k_cache.stride()[:2], heads, dim, size),
            *(gpu.next_power_of_2(dim), gpu.next_power_of_2(size)),
            num_warps=4,
        )
    return key


@mean_summary.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        cache = make.randn(6, 2, 8, 16, dtype=dtype)
        cache[2] = torch.nan
        yield make.args(cache, make.tensor([5, 0, 3], torch.int64))
        yield make.args(cache, make.tensor([], torch.int64))
