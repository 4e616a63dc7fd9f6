"""How the indexer's keys lie in pages: the formats that the ops of this folder share.

An unquantized cache is [pages, S, D], of the model's dtype. A quantized one is bytes, [pages,
S * (D + 4)] uint8: a page holds S * D numbers in float8 e4m3, and behind them the S float32 scales
of its tokens. Number x of a token with scale s is worth x * s.

The linear layout has the D numbers of a token side by side. The preshuffled one has tiles of 16
tokens by 16 dims, 256 bytes side by side: what a 16 x 16 matrix instruction reads at once. Nothing
in the bytes tells one from the other: every op on a cache has to be given the same layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.cache.quantized import BYTES
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.elementwise.hadamard_transform import hadamard_transform
from cairn.ops.quantization import e8m0
from cairn.ops.quantization.codes import E4M3, E4M3_MAX, e4m3, scale_for

TILE = 16
"""Tokens and dims of a tile of the preshuffled layout."""
MOST_ROTATED = 256
SCALE_BYTES = 4
LEAST_AMAX = 1e-4
"""The largest number of a key counts as this at least: a key of zeros has a scale, too."""


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache is bytes."""
    return cache.dtype == BYTES


def page_size(cache: Tensor, dim: int) -> int:
    """Tokens of a page, S."""
    return cache.shape[1] // (dim + SCALE_BYTES) if is_quantized(cache) else cache.shape[1]


def check_cache(op: str, cache: Tensor, dim: int, preshuffled: bool, like: Tensor) -> int:
    """Raise BadArgument unless `cache` holds keys of dim D in one of the formats. Returns S."""
    if not (isinstance(cache, Tensor) and is_quantized(cache)):
        expect(op, "cache", cache, (None, None, dim), FLOATS, like, 1)
        if preshuffled:
            refuse(op, "preshuffled", "is True, but the cache is not quantized (uint8)")
        return _some(op, cache, cache.shape[1])
    expect(op, "cache", cache, (None, None), (BYTES,), like, 1)
    token = dim + SCALE_BYTES
    if cache.shape[1] % token:
        wanted = f"[pages, n * {token}], for {dim} numbers and a scale of each token"
        refuse(op, "cache", f"has shape {list(cache.shape)}, not {wanted}")
    size = _some(op, cache, cache.shape[1] // token)
    if preshuffled and (size % TILE or dim % TILE):
        refuse(op, "preshuffled", f"is True, but tiles of {TILE} do not fit {size} x {dim} numbers")
    return size


def _some(op: str, cache: Tensor, size: int) -> int:
    if not size:
        refuse(op, "cache", f"has shape {list(cache.shape)}: pages for no token")
    return size


def quantize(k: Tensor, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Keys [..., D] as (numbers [..., D] e4m3, scales [...] float32).

    The scale is max(|k|, 1e-4) / 448, or the least power of two that is not below that; numbers are
    rounded to the nearest, ties to even.
    """
    k = k.float()
    scale = scale_for(k.abs().amax(dim=-1).clamp(min=LEAST_AMAX), E4M3_MAX)
    if scale_ue8m0:
        scale = e8m0.power_of_two(scale)
    return e4m3(k / scale.unsqueeze(-1)), scale


def check_rotation(op: str, dim: int) -> None:
    """Raise BadArgument unless there is a Hadamard matrix of D that keys may be multiplied by."""
    if dim & (dim - 1) or not TILE <= dim <= MOST_ROTATED:
        refuse(op, "hadamard", f"is True, but {dim} is no power of two from 16 to {MOST_ROTATED}")


def rotate(k: Tensor) -> Tensor:
    """Keys or queries [..., D] times the Hadamard matrix of D, times D^-0.5: a rotation, in
    float32. Scores stay, and few large dims no longer decide the scale of all."""
    turned: Tensor = hadamard_transform.reference(k.float(), k.shape[-1] ** -0.5)
    return turned


def byte_positions(offset: Tensor, size: int, dim: int, preshuffled: bool) -> Tensor:
    """Where in a page the bytes of tokens lie: [N, D + 4] int64, the numbers', then the scale's.

    Args:
        offset: [N] int64, of the tokens in their pages.
        size, dim: S, D.
        preshuffled: the layout.
    """
    token, column = offset.unsqueeze(-1), torch.arange(dim, device=offset.device)
    if preshuffled:
        tile = token // TILE * (dim // TILE) + column // TILE
        number = tile * TILE * TILE + token % TILE * TILE + column % TILE
    else:
        number = token * dim + column
    scale = torch.arange(SCALE_BYTES, device=offset.device) + SCALE_BYTES * token + size * dim
    return torch.cat((number, scale), dim=-1)


def unpack(pages: Tensor, dim: int, preshuffled: bool) -> tuple[Tensor, Tensor]:
    """Whole pages [N, S * (D + 4)] uint8 as (numbers [N, S, D] e4m3, scales [N, S] float32)."""
    count, size = len(pages), pages.shape[1] // (dim + SCALE_BYTES)
    numbers, scales = pages.split((size * dim, size * SCALE_BYTES), dim=1)
    if preshuffled:
        tiles = numbers.reshape(count, size // TILE, dim // TILE, TILE, TILE)
        numbers = tiles.transpose(2, 3)
    keys = numbers.reshape(count, size, dim).view(E4M3)
    return keys, scales.contiguous().view(torch.float32)


def pack(keys: Tensor, preshuffled: bool, scale_ue8m0: bool) -> Tensor:
    """Whole pages [pages, S, D] as a quantized cache holds them, [pages, S * (D + 4)] uint8."""
    pages, size, dim = keys.shape
    numbers, scales = quantize(keys, scale_ue8m0)
    offset = torch.arange(size, device=keys.device)
    packed = torch.empty(pages, size * (dim + SCALE_BYTES), dtype=BYTES, device=keys.device)
    tokens = torch.cat((numbers.view(BYTES), scales.unsqueeze(-1).view(BYTES)), dim=-1)
    packed[:, byte_positions(offset, size, dim, preshuffled)] = tokens
    return packed
