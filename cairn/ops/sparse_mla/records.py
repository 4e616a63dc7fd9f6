"""The cache record of a token in multi-head latent attention: [latent | rotary key].

An unquantized cache is [pages, S, r + dr], of the model's dtype. A quantized one (the format
fp8_ds) is bytes, [pages, S, r + 4 * (r / 128) + 2 * dr] uint8: the latent as float8 e4m3 codes, the
float32 scales of its tiles of 128, and the rotary key in bfloat16. With r = 512 and dr = 64 a
record has 656 bytes. Scales are powers of two: some readers of this format use the exponent only.

A second quantised format is for records whose value is the whole record, rotated elements included
(DeepSeek-V4: 584 bytes): r float8 elements, an e8m0 byte per tile of 64 of them, padded to a
multiple of 8 bytes, and dr bfloat16 elements. r tells the format: it is a multiple of 128 in the
first, and an odd multiple of 64 in the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.cache.quantized import BYTES
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.quantization import e8m0
from cairn.ops.quantization.codes import E4M3, E4M3_MAX, e4m3, scale_for

TILE = 128
"""Elements of a latent per scale."""
WHOLE_TILE, WHOLE_SCALES = 64, 8
"""Second format: elements per scale, and the multiple to which the number of scales is padded."""
MIN_SCALE = 1e-4
"""Lower bound of scales, before they are rounded up to a power of two."""


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache is quantised (uint8)."""
    return cache.dtype == BYTES


def record_bytes(latent: int, rope: int) -> int:
    """Bytes of a quantized record."""
    return latent + 4 * (latent // TILE) + 2 * rope


def whole_bytes(latent: int, rope: int) -> int:
    """Bytes of a record of the second format."""
    scales = -(-latent // WHOLE_TILE)
    return latent + -(-scales // WHOLE_SCALES) * WHOLE_SCALES + 2 * rope


def whole_latent(width: int, size: int) -> int | None:
    """r of a record of the second format with `width` elements in `size` bytes; None if no record
    has these sizes."""
    counts = range(WHOLE_TILE, width + 1, 2 * WHOLE_TILE)
    return next((n for n in counts if whole_bytes(n, width - n) == size), None)


def check_cache(
    op: str,
    cache: Tensor,
    latent: int,
    rope: int,
    like: Tensor,
    dtype: torch.dtype,
    name: str = "cache",
) -> int:
    """Raise BadArgument unless `cache`, the argument `name`, holds such records, of `dtype` or
    quantised. Returns S."""
    if isinstance(cache, Tensor) and is_quantized(cache):
        size = record_bytes(latent, rope)
        if not rope and cache.dim() == 3 and whole_latent(latent, cache.shape[2]):
            size = cache.shape[2]
        elif latent % TILE == WHOLE_TILE:
            size = whole_bytes(latent, rope)
        elif not latent or latent % TILE:
            refuse(op, name, f"is uint8: a latent of {latent} numbers is no tiles of {TILE}")
        shape = (None, None, size)
        expect(op, name, cache, shape, (BYTES,), like, 1)
    else:
        expect(op, name, cache, (None, None, latent + rope), FLOATS, like, 1)
        expect(op, name, cache, 3, (dtype, BYTES))
    if not cache.shape[1]:
        refuse(op, name, f"has shape {list(cache.shape)}: pages for no token")
    return cache.shape[1]


def quantize(latent: Tensor, k_pe: Tensor) -> Tensor:
    """Records [T, bytes] uint8 of latents [T, r] and rotary keys [T, dr]."""
    if latent.shape[1] % TILE:
        return _quantize_whole(latent, k_pe)
    tiles = latent.float().unflatten(-1, (-1, TILE))
    amax = tiles.abs().amax(dim=-1)
    scale = e8m0.power_of_two(scale_for(amax, E4M3_MAX).clamp(min=MIN_SCALE))
    codes = e4m3(tiles / scale.unsqueeze(-1)).flatten(-2)
    parts = (codes, scale, k_pe.to(torch.bfloat16).contiguous())
    return torch.cat([part.view(BYTES) for part in parts], dim=-1)


def _quantize_whole(latent: Tensor, k_pe: Tensor) -> Tensor:
    """`quantize` for the second format."""
    tiles = latent.float().unflatten(-1, (-1, WHOLE_TILE))
    amax = tiles.abs().amax(dim=-1).clamp(min=MIN_SCALE)
    exponent = e8m0.encode(scale_for(amax, E4M3_MAX))
    codes = e4m3(tiles / e8m0.decode(exponent).unsqueeze(-1)).flatten(-2)
    padding = exponent.new_zeros(len(exponent), -exponent.shape[1] % WHOLE_SCALES)
    parts = (codes, exponent, padding, k_pe.to(torch.bfloat16).contiguous())
    return torch.cat([part.view(BYTES) for part in parts], dim=-1)


def dequantize_whole(records: Tensor, latent: int) -> Tensor:
    """Records [..., bytes] uint8 of the second format, r = `latent`, as [..., r + dr] float32."""
    tiles = latent // WHOLE_TILE
    scales = -(-tiles // WHOLE_SCALES) * WHOLE_SCALES
    rope = records.shape[-1] - latent - scales
    codes, exponent, k_pe = (
        part.contiguous() for part in records.split((latent, scales, rope), -1)
    )
    values = codes.view(E4M3).float().unflatten(-1, (-1, WHOLE_TILE))
    values = (values * e8m0.decode(exponent[..., :tiles]).unsqueeze(-1)).flatten(-2)
    return torch.cat((values, k_pe.view(torch.bfloat16).float()), dim=-1)


def dequantize(records: Tensor, latent: int) -> Tensor:
    """Records [..., bytes] uint8 of the first format, r = `latent`, as [..., r + dr] float32."""
    scales = latent // TILE * 4
    rope = records.shape[-1] - latent - scales
    codes, scale, k_pe = (part.contiguous() for part in records.split((latent, scales, rope), -1))
    tiles = codes.view(E4M3).float().unflatten(-1, (-1, TILE))
    values = (tiles * scale.view(torch.float32).unsqueeze(-1)).flatten(-2)
    return torch.cat((values, k_pe.view(torch.bfloat16).float()), dim=-1)


def take(cache: Tensor, cells: Tensor, latent: int, width: int) -> Tensor:
    """Records of cells [n, W] (int64, all in the cache), [n, W, width] float32, new memory."""
    if cache.is_contiguous():
        # index_select copies whole rows; indexing with a tensor copies element by element.
        lines = cache.flatten(0, 1).index_select(0, cells.flatten())
        taken = lines.view(*cells.shape, cache.shape[2])
    else:
        size = cache.shape[1]
        taken = cache[cells // size, cells % size]
    if not is_quantized(cache):
        return taken.float()
    whole = whole_latent(width, cache.shape[2]) if latent == width else None
    return dequantize(taken, latent) if whole is None else dequantize_whole(taken, whole)
