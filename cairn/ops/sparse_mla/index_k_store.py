"""Write of the lightning indexer's keys to their paged cache (DeepSeek-V3.2 report, section
2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache.quantized import BYTES
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT64, expect, expect_within, refuse
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache, locations, store_launch


@op(mutates=("cache",))
def index_k_store(
    k: Tensor,
    cache: Tensor,
    location: Tensor,
    preshuffled: bool = False,
    scale_ue8m0: bool = False,
    hadamard: bool = False,
) -> None:
    """Write every token's index key to its slot, in float8 if the cache is uint8.

    A quantized key is e4m3(k / s) and its scale s = max(|k|, 1e-4) / 448, in float32.

    Args:
        k: [T, D]; of an unquantized cache's dtype, else float32, bfloat16 or float16.
        cache: [pages, S, D], or quantized [pages, S * (D + 4)] uint8; changed.
        location: [T] int64, page * S + slot in the page; tokens with a negative one are skipped.
        preshuffled: the quantized cache has tiles of 16 tokens by 16 dims.
        scale_ue8m0: s is rounded up to a power of two.
        hadamard: k is multiplied by the Hadamard matrix of D times D^-0.5 first; quantised caches
            only.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a location beyond the
            cache.
    """
    dim = k.shape[1]
    size = index_cache.page_size(cache, dim)
    if not index_cache.is_quantized(cache):
        locations.store(
            cache,
            k,
            location,
            cache.shape[0] * size,
            lambda location: (location // size, location % size),
        )
        return
    transformed = index_cache.rotate(k) if hadamard else k
    numbers, scale = index_cache.quantize(transformed, scale_ue8m0)
    values = torch.cat((numbers.view(BYTES), scale.unsqueeze(-1).view(BYTES)), dim=1)
    locations.store(
        cache,
        values,
        location,
        cache.shape[0] * size,
        lambda location: (
            (location // size).unsqueeze(-1),
            index_cache.byte_positions(location % size, size, dim, preshuffled),
        ),
    )


@index_k_store.check
def _(call: Call) -> None:
    name = "index_k_store"
    expect(name, "k", call.k, 2, FLOATS)
    size = index_cache.check_cache(name, call.cache, call.k.shape[1], call.preshuffled, call.k)
    if not index_cache.is_quantized(call.cache):
        expect(name, "k", call.k, 2, (call.cache.dtype,))
        if call.hadamard:
            refuse(name, "hadamard", "is True, but the cache is not quantized (uint8)")
    if call.hadamard:
        index_cache.check_rotation(name, call.k.shape[1])
    expect(name, "location", call.location, call.k.shape[:1], INT64, call.k, -1)
    expect_within(name, "location", call.location, call.cache.shape[0] * size, begin=None)


def _fits(call: Call) -> bool:
    return store_launch.fits_index(call.k, call.cache, call.location)


@index_k_store.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> None:
    switches = (call.preshuffled, call.scale_ue8m0, call.hadamard)
    store_launch.store_index(call.k, call.cache, call.location, *switches)
