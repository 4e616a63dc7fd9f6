"""The paged cache formats of the indexer's keys.

An unquantized cache is [pages, S, D], of the model's dtype. A quantized one is bytes, [pages, S *
(D + 4)] uint8: a page holds S * D float8 e4m3 codes, followed by the float32 scales of its S
tokens. Code x of a token with scale s stands for x * s.

In the linear layout the D codes of a token are contiguous. The preshuffled one has contiguous tiles
of 16 tokens by 16 dims, 256 bytes, the operand of a 16 x 16 matrix instruction. The bytes do not
tell the two apart: every op on a cache must be given the same layout.
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
"""Tokens, and dims, per tile of the preshuffled layout."""
MAX_ROTATED = 256
SCALE_BYTES = 4
MIN_AMAX = 1e-4
"""Lower bound of max |k| in the scale, so that a key of zeros has a scale."""


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache is quantised (uint8)."""
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
    """Keys [..., D] as (codes [..., D] e4m3, scales [...] float32).

    The scale is max(|k|, 1e-4) / 448, or with scale_ue8m0 that rounded up to a power of two; codes
    are rounded to the nearest, ties to even.
    """
    k = k.float()
    scale = scale_for(k.abs().amax(dim=-1).clamp(min=MIN_AMAX), E4M3_MAX)
    if scale_ue8m0:
        scale = e8m0.power_of_two(scale)
    return e4m3(k / scale.unsqueeze(-1)), scale


def check_rotation(op: str, dim: int) -> None:
    """Raise BadArgument unless `dim` has a supported Hadamard matrix."""
    if dim & (dim - 1) or not TILE <= dim <= MAX_ROTATED:
        refuse(op, "hadamard", f"is True, but {dim} is no power of two from 16 to {MAX_ROTATED}")


def rotate(k: Tensor) -> Tensor:
    """Keys or queries [..., D] times the Hadamard matrix of D, times D^-0.5, in float32: a
    rotation, which keeps scores and spreads a few large dims over all, so that they do not dominate
    the scale."""
    transformed: Tensor = hadamard_transform.reference(k.float(), k.shape[-1] ** -0.5)
    return transformed


def byte_positions(offset: Tensor, size: int, dim: int, preshuffled: bool) -> Tensor:
    """Byte offsets of tokens in a page: [N, D + 4] int64, those of the codes, then those of the
    scale.

    Args:
        offset: [N] int64, slots of the tokens in their pages.
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
    """Whole pages [N, S * (D + 4)] uint8 as (codes [N, S, D] e4m3, scales [N, S] float32)."""
    count, size = len(pages), pages.shape[1] // (dim + SCALE_BYTES)
    codes, scales = pages.split((size * dim, size * SCALE_BYTES), dim=1)
    if preshuffled:
        tiles = codes.reshape(count, size // TILE, dim // TILE, TILE, TILE)
        codes = tiles.transpose(2, 3)
    keys = codes.reshape(count, size, dim).view(E4M3)
    return keys, scales.contiguous().view(torch.float32)


def pack(keys: Tensor, preshuffled: bool, scale_ue8m0: bool) -> Tensor:
    """Whole pages [pages, S, D] in the format of a quantised cache, [pages, S * (D + 4)] uint8."""
    pages, size, dim = keys.shape
    codes, scales = quantize(keys, scale_ue8m0)
    offset = torch.arange(size, device=keys.device)
    packed = torch.empty(pages, size * (dim + SCALE_BYTES), dtype=BYTES, device=keys.device)
    tokens = torch.cat((codes.view(BYTES), scales.unsqueeze(-1).view(BYTES)), dim=-1)
    packed[:, byte_positions(offset, size, dim, preshuffled)] = tokens
    return packed
