"""Gather of the lightning indexer's keys from their paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import INT64, check_min, expect, expect_within
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache


@op
def index_k_gather(
    cache: Tensor, location: Tensor, head_dim: int, preshuffled: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and scales of index keys, bit for bit as `index_k_store` wrote them.

    Args:
        cache: [pages, S, D], or quantized [pages, S * (D + 4)] uint8.
        location: [N] int64, page * S + slot in the page; a negative one gives zeros with scale 1.
        head_dim: D.
        preshuffled: the quantised cache has tiles of 16 tokens by 16 dims.
    Returns:
        (k [N, D] float8_e4m3fn, scale [N] float32); a key is k * scale. From an unquantised cache,
        k has its dtype and every scale is 1.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a location beyond the
            cache.
    """
    size = index_cache.page_size(cache, head_dim)
    capacity = cache.shape[0] * size
    kept = (location >= 0) & (location < capacity)
    scale = torch.ones(location.shape, dtype=torch.float32, device=cache.device)
    if not capacity:
        dtype = E4M3 if index_cache.is_quantized(cache) else cache.dtype
        return cache.new_zeros((len(location), head_dim), dtype=dtype), scale
    cell = location.clamp(0, capacity - 1)
    page, offset = cell // size, cell % size
    hidden = ~kept.unsqueeze(-1)
    if not index_cache.is_quantized(cache):
        return cache[page, offset].masked_fill(hidden, 0), scale
    positions = index_cache.byte_positions(offset, size, head_dim, preshuffled)
    numbers, scales = cache[page.unsqueeze(-1), positions].split((head_dim, 4), dim=1)
    scale = torch.where(kept, scales.contiguous().view(torch.float32)[:, 0], scale)
    return numbers.masked_fill(hidden, 0).view(E4M3), scale


@index_k_gather.check
def _(call: Call) -> None:
    name = "index_k_gather"
    check_min(name, "head_dim", call.head_dim, 1)
    expect(name, "location", call.location, 1, INT64, dense=-1)
    size = index_cache.check_cache(name, call.cache, call.head_dim, call.preshuffled, call.location)
    expect_within(name, "location", call.location, call.cache.shape[0] * size, begin=None)
