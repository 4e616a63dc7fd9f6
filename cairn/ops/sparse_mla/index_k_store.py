"""Keys of the lightning indexer enter their paged cache (DeepSeek-V3.2 report, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.cache.quantized import BYTES
from cairn.ops.checks import FLOATS, INT64, expect, expect_within
from cairn.ops.registry import op
from cairn.ops.sparse_mla import index_cache, locations
from cairn.ops.sparse_mla.samples import sizes_of, token_counts
from cairn.ops.testing import Cases, Make


@op(mutates=("cache",))
def index_k_store(
    k: Tensor,
    cache: Tensor,
    location: Tensor,
    preshuffled: bool = False,
    scale_ue8m0: bool = False,
) -> None:
    """Write every token's index key into its slot, in float8 if the cache is bytes.

    A quantized key is e4m3(k / s) and its scale s = max(|k|, 1e-4) / 448, in float32.

    Args:
        k: [T, D]; of an unquantized cache's dtype, else float32, bfloat16 or float16.
        cache: [pages, S, D], or quantized [pages, S * (D + 4)] uint8; changed.
        location: [T] int64, page * S + slot in the page; a negative one is not written.
        preshuffled: the quantized cache has tiles of 16 tokens by 16 dims.
        scale_ue8m0: s is the least power of two that is not below it.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a location behind the
            cache.
    """
    dim = k.shape[1]
    size = index_cache.page_size(cache, dim)
    if not index_cache.is_quantized(cache):
        locations.store(
            *(cache, k, location, cache.shape[0] * size),
            lambda location: (location // size, location % size),
        )
        return
    numbers, scale = index_cache.quantize(k, scale_ue8m0)
    values = torch.cat((numbers.view(BYTES), scale.unsqueeze(-1).view(BYTES)), dim=1)
    locations.store(
        *(cache, values, location, cache.shape[0] * size),
        lambda location: (
            (location // size).unsqueeze(-1),
            index_cache.byte_positions(location % size, size, dim, preshuffled),
        ),
    )


@index_k_store.check
def _(
    k: Tensor,
    cache: Tensor,
    location: Tensor,
    preshuffled: bool = False,
    scale_ue8m0: bool = False,
) -> None:
    name = "index_k_store"
    expect(name, "k", k, 2, FLOATS)
    size = index_cache.check_cache(name, cache, k.shape[1], preshuffled, k)
    if not index_cache.is_quantized(cache):
        expect(name, "k", k, 2, (cache.dtype,))
    expect(name, "location", location, k.shape[:1], INT64, k, -1)
    expect_within(name, "location", location, cache.shape[0] * size, begin=None)


@index_k_store.cases
def _(make: Make) -> Cases:
    for dtype, size, dim in ((torch.float32, 4, 24), (torch.bfloat16, 32, 48)):
        spot = make.tensor([0, 3, 17, -1, 2 * size, 5 * size - 1, -7], torch.int64)
        k = make.randn(7, dim, dtype=dtype)
        k[2] = 0.0
        cache = make.randn(5, size, dim, dtype=dtype)
        yield make.args(k, cache, spot)
        yield make.args(k[3:4], cache, spot[3:4])
        yield make.args(k[:0], cache, spot[:0])
        yield make.args(k, make.randn(5, size, 2 * dim, dtype=dtype)[..., :dim], spot)
        small = make.randint(0, 256, 5, size * (dim + 4), dtype=torch.uint8)
        for power in (False, True):
            yield make.args(k, small, spot, scale_ue8m0=power)
            if size == 32:
                yield make.args(k, small, spot, preshuffled=True, scale_ue8m0=power)
        yield make.args(k[3:4], small, spot[3:4])
        yield make.args(k[:0], small, spot[:0])


@index_k_store.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    token = sizes.index_dim + index_cache.SCALE_BYTES
    for tokens in token_counts(draw):
        k = draw.randn(tokens, sizes.index_dim)
        pages = tokens // sizes.page + 64
        cache = draw.randint(0, 127, pages, sizes.page * token, dtype=BYTES)
        location = draw.rand(pages * sizes.page).argsort()[:tokens]
        yield Point(
            f"{tokens} x {sizes.index_dim}",
            draw.args(k, cache, location),
            moved(k, location) + tokens * token,
            alternatives=draw.by_torch(index_k_store.reference),
        )
