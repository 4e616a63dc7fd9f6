"""Latents and rotary keys of a step enter their paged cache (DeepSeek-V2 report, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.cache.quantized import BYTES
from cairn.ops.checks import FLOATS, INT64, expect, expect_within
from cairn.ops.registry import op
from cairn.ops.sparse_mla import locations, records
from cairn.ops.sparse_mla.samples import sizes_of, token_counts
from cairn.ops.testing import Cases, Make


@op(mutates=("cache",))
def mla_kv_store(latent: Tensor, k_pe: Tensor, cache: Tensor, location: Tensor) -> None:
    """Write every token's latent and rotary key into its slot, the latent in float8 if it is bytes.

    A quantized latent is e4m3(x / s) in tiles of 128 with s = 2^ceil(log2(max(|x| / 448, 1e-4))).

    Args:
        latent: [T, r]; of an unquantized cache's dtype, else float32, bfloat16 or float16.
        k_pe: [T, dr], of latent's dtype.
        cache: [pages, S, r + dr], or quantized, [pages, S, r + 4 * (r / 128) + 2 * dr] uint8: the
            latent, its scales in float32, k_pe in bfloat16; changed.
        location: [T] int64, page * S + slot in the page; a negative one is not written.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a location behind the
            cache.
    """
    pages, size, _ = cache.shape
    if records.is_quantized(cache):
        values = records.quantize(latent, k_pe)
    else:
        values = torch.cat((latent, k_pe), dim=-1)
    locations.store(
        *(cache, values, location, pages * size),
        lambda location: (location // size, location % size),
    )


@mla_kv_store.check
def _(latent: Tensor, k_pe: Tensor, cache: Tensor, location: Tensor) -> None:
    name = "mla_kv_store"
    expect(name, "latent", latent, 2, FLOATS)
    expect(name, "k_pe", k_pe, (len(latent), None), (latent.dtype,), latent)
    widths = (latent.shape[1], k_pe.shape[1])
    size = records.check_cache(name, cache, *widths, latent, latent.dtype)
    expect(name, "location", location, latent.shape[:1], INT64, latent, -1)
    expect_within(name, "location", location, len(cache) * size, begin=None)


@mla_kv_store.cases
def _(make: Make) -> Cases:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 32)):
        spot = make.tensor([0, 3, 17, -1, 2 * size, 5 * size - 1, -7], torch.int64)
        latent, k_pe = make.randn(7, 256, dtype=dtype), make.randn(7, 16, dtype=dtype)
        latent[2] = 0.0
        cache = make.randn(5, size, 272, dtype=dtype)
        yield make.args(latent, k_pe, cache, spot)
        yield make.args(latent[:0], k_pe[:0], cache, spot[:0])
        both = make.randn(7, 300, dtype=dtype)
        yield make.args(both[:, :256], both[:, 256:272], cache, spot)
        small = make.randint(0, 256, 5, size, 296, dtype=torch.uint8)
        yield make.args(latent, k_pe, small, spot)
        yield make.args(both[:, :256], both[:, 256:272], small, spot)
        yield make.args(latent[3:4], k_pe[3:4], small, spot[3:4])


@mla_kv_store.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    widths = (sizes.latent, sizes.rope)
    for tokens in token_counts(draw):
        pages = tokens // sizes.page + 64
        latent, k_pe = (draw.randn(tokens, width) for width in widths)
        location = draw.rand(pages * sizes.page).argsort()[:tokens]
        shape = (pages, sizes.page)
        plain = draw.randn(*shape, sum(widths))
        small = draw.randint(0, 127, *shape, records.record_bytes(*widths), dtype=BYTES)
        for kind, cache in (("plain", plain), ("float8", small)):
            yield Point(
                f"{tokens}, {kind}",
                draw.args(latent, k_pe, cache, location),
                moved(latent, k_pe, location) + tokens * cache[0, 0].nbytes,
                alternatives=draw.by_torch(mla_kv_store.reference),
            )
