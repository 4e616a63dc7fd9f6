"""The engine's layout of packed 4-bit and 8-bit weights.

A matrix [N, K] is int32 words [W, N]: word row 16 t + r of a column holds the codes of k = 16 (p t
+ j) + r for j = 0 .. p - 1, p = 32 / bits, the first in the lowest bits. One shift and mask of 16
rows of words thus gives 16 consecutive k of a column, the K of one tensor-core instruction. K is
padded to a multiple of 16 p with codes of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.quantization.codes import E4M3
from cairn.ops.weight_only import packing
from cairn.ops.weight_only.packing import WORD

ROWS = 16
"""Rows of words per block."""


def block(bits: int) -> int:
    """Elements of a column per block; K is padded to a multiple of it."""
    return ROWS * WORD // bits


def words_of(width: int, bits: int) -> int:
    """W, the number of word rows of a matrix with K = `width`."""
    return -(-width // block(bits)) * ROWS


def to_words(codes: Tensor, bits: int) -> Tensor:
    """[.., W, N] int32 of codes [.., N, K], integers 0 .. 2^bits - 1."""
    size = block(bits)
    padded = torch.nn.functional.pad(codes.int(), (0, -codes.shape[-1] % size))
    # [.., N, t, j, r] -> [.., N, t, r, j]
    tiles = padded.unflatten(-1, (-1, WORD // bits, ROWS)).transpose(-1, -2)
    return packing.pack(tiles.flatten(-3), bits, -1).transpose(-1, -2).contiguous()


def from_words(words: Tensor, bits: int, width: int) -> Tensor:
    """Codes [.., N, K] int32; the inverse of `to_words`."""
    flat = packing.unpack(words.transpose(-1, -2), bits, -1)
    tiles = flat.unflatten(-1, (-1, ROWS, WORD // bits)).transpose(-1, -2)
    return tiles.flatten(-3)[..., :width]


def dequantised(
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    width: int,
    e4m3: bool = False,
) -> Tensor:
    """Values [.., N, K] float32 of words [.., W, N], scales [.., G, N] and zero points [.., G, N]
    (None: 2^(bits - 1)); 8-bit codes may be e4m3, without zero points."""
    groups = scale.shape[-2]
    at = packing.group_of(width, groups, None, words.device)
    codes = from_words(words, bits, width)
    factor = scale.index_select(-2, at).transpose(-1, -2)
    if e4m3:
        return codes.to(torch.uint8).view(E4M3).float() * factor
    middle: Tensor | int = 1 << bits - 1
    if zero is not None:
        middle = zero.int().index_select(-2, at).transpose(-1, -2)
    return (codes - middle).float() * factor
