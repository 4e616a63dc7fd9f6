"""The summary of a page as the mean of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache import quantized
from cairn.ops.call import Call
from cairn.ops.checks import INT64, check_cache, expect
from cairn.ops.landmark.kernels.summary import mean_summary_kernel
from cairn.ops.registry import op

WARPS = 1
"""Warps per program, which handles one page and KV head."""


@op
def mean_summary(k_cache: Tensor, pages: Tensor) -> Tensor:
    """Mean key of complete pages over all S slots.

    Args:
        k_cache: [pages, h_kv, S, d], or quantized.
        pages: [N] int64, physical ids.
    Returns:
        [N, h_kv, d] in the cache's dtype, float32 for a quantized one; summed in float32, rounded
        once.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    if quantized.is_quantized(k_cache):
        return quantized.take(k_cache, pages).mean(dim=2)
    return k_cache.index_select(0, pages).float().mean(dim=2).to(k_cache.dtype)


@mean_summary.check
def _(call: Call) -> None:
    check_cache("mean_summary", call.k_cache)
    expect("mean_summary", "pages", call.pages, 1, INT64, call.k_cache, -1)


@mean_summary.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        quantized.is_quantized(call.k_cache)
        or call.k_cache.stride()[2:] == (call.k_cache.shape[3], 1)
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    heads, size, dim = call.k_cache.shape[1:]
    dtype = call.k_cache.dtype
    if quantized.is_quantized(call.k_cache):
        dim, dtype = quantized.form_of(call.k_cache)[1], torch.float32
    key = gpu.empty((call.pages.numel(), heads, dim), dtype, call.k_cache.device)
    if call.pages.numel():
        mean_summary_kernel[(call.pages.numel() * heads,)](
            k_cache=call.k_cache,
            pages=call.pages,
            key=key,
            page_stride=call.k_cache.stride(0),
            head_stride=call.k_cache.stride(1),
            KV_HEADS=heads,
            DIM=dim,
            SIZE=size,
            DP=gpu.next_power_of_2(dim),
            KEYS=gpu.next_power_of_2(size),
            num_warps=WARPS,
        )
    return key
