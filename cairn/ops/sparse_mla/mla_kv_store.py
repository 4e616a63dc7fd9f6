"""Write of latents and rotary keys to their paged cache (DeepSeek-V2 report, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT64, expect, expect_within
from cairn.ops.registry import op
from cairn.ops.sparse_mla import locations, records, store_launch


@op(mutates=("cache",))
def mla_kv_store(latent: Tensor, k_pe: Tensor, cache: Tensor, location: Tensor) -> None:
    """Write every token's latent and rotary key to its slot; the latent in float8 if the cache is
    uint8.

    A quantised latent is e4m3(x / s) in tiles of 128 with s = 2^ceil(log2(max(|x| / 448, 1e-4))).
    If r / 64 is odd, tiles have 64 elements, and s = 2^ceil(log2(max(|x|, 1e-4) / 448)).

    Args:
        latent: [T, r]; of an unquantized cache's dtype, else float32, bfloat16 or float16.
        k_pe: [T, dr], of latent's dtype.
        cache: [pages, S, r + dr], or quantized, [pages, S, r + 4 * (r / 128) + 2 * dr] uint8: the
            latent, its scales in float32, k_pe in bfloat16; with r / 64 odd, scales are e8m0 bytes,
            padded with zeros to a multiple of 8; changed.
        location: [T] int64, page * S + slot in the page; tokens with a negative one are skipped.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a location beyond the
            cache.
    """
    pages, size, _ = cache.shape
    if records.is_quantized(cache):
        values = records.quantize(latent, k_pe)
    else:
        values = torch.cat((latent, k_pe), dim=-1)
    locations.store(
        cache,
        values,
        location,
        pages * size,
        lambda location: (location // size, location % size),
    )


@mla_kv_store.check
def _(call: Call) -> None:
    name = "mla_kv_store"
    expect(name, "latent", call.latent, 2, FLOATS)
    expect(name, "k_pe", call.k_pe, (len(call.latent), None), (call.latent.dtype,), call.latent)
    widths = (call.latent.shape[1], call.k_pe.shape[1])
    size = records.check_cache(name, call.cache, *widths, call.latent, call.latent.dtype)
    expect(name, "location", call.location, call.latent.shape[:1], INT64, call.latent, -1)
    expect_within(name, "location", call.location, len(call.cache) * size, begin=None)


def _fits(call: Call) -> bool:
    return store_launch.fits_records(call.latent, call.k_pe, call.cache, call.location)


@mla_kv_store.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> None:
    store_launch.store_records(call.latent, call.k_pe, call.cache, call.location)
