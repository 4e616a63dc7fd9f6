"""Packing of 2-bit to 8-bit integers in 32-bit words, in the orders of checkpoint formats.

GPTQ packs along the input axis K, value after value, also across the borders of words (3 bits).
AWQ packs along the output axis N, 8 columns a word in the order (0, 4, 1, 5, 2, 6, 3, 7). Marlin
cuts a matrix into tiles of 16 x 64 and stores each in the order of a tensor core's fragments. Every
order is a list of indices, so one function packs all formats and one unpacks them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 32
"""Bits per word."""
AWQ_ORDERS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""bits -> the position in a word of each of its columns."""
INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""bits -> the value at each position of a word in Marlin's layouts."""
TILE_K, TILE_N = 16, 64
"""Rows (along K) and columns (along N) of Marlin's tiles."""


def unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """Codes int32 of words (int32), 32 / bits times as many along an axis; the lowest bits of a
    word come first, and with 3 bits values run on from a word to the next."""
    axis %= words.dim()
    count = words.shape[axis] * WORD // bits
    wide = words.long() & 0xFFFFFFFF
    first = torch.arange(count, device=words.device) * bits
    low = wide.index_select(axis, first // WORD)
    last = ((first + bits - 1) // WORD).clamp(max=max(words.shape[axis] - 1, 0))
    high = wide.index_select(axis, last)
    shape = [1] * words.dim()
    shape[axis] = count
    shift = (first % WORD).view(shape)
    both = (low | high << WORD) >> shift
    # If a value ends in its own word, `high` is that same word, whose copy is shifted above the
    # value.
    return (both & ((1 << bits) - 1)).int()


def pack(codes: Tensor, bits: int, axis: int) -> Tensor:
    """The words of codes 0 .. 2^bits - 1; the inverse of `unpack`. The codes along the axis fill
    whole words."""
    axis %= codes.dim()
    moved = codes.movedim(axis, -1).long()
    at = torch.arange(moved.shape[-1], device=codes.device) * bits
    spread = (moved << at % WORD) & ((1 << WORD + bits) - 1)
    words = torch.zeros(
        (*moved.shape[:-1], moved.shape[-1] * bits // WORD + 1),
        dtype=torch.int64,
        device=codes.device,
    )
    words.index_add_(-1, at // WORD, spread & 0xFFFFFFFF)
    words.index_add_(-1, at // WORD + 1, spread >> WORD)
    whole = words[..., :-1]
    signed = torch.where(whole >= 1 << WORD - 1, whole - (1 << WORD), whole)
    return signed.int().movedim(-1, axis)


def take_places(codes: Tensor, order: Sequence[int], axis: int) -> Tensor:
    """Permute each run of len(order) codes along an axis: position i gets the code at order[i]."""
    axis %= codes.dim()
    runs = codes.unflatten(axis, (-1, len(order)))
    places = index(order, codes.device)
    return runs.index_select(axis + 1, places).flatten(axis, axis + 1)


def index(order: Sequence[int], device: torch.device) -> Tensor:
    """An order as an index tensor."""
    return torch.tensor(list(order), dtype=torch.int64, device=device)


def inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes `order`."""
    found = [0] * len(order)
    for place, taken in enumerate(order):
        found[taken] = place
    return found


def unpack_awq(words: Tensor, bits: int = 4) -> Tensor:
    """Codes [.., N] of AWQ's words [.., N * bits / 32]."""
    return take_places(unpack(words, bits, -1), AWQ_ORDERS[bits], -1)


def marlin_order(bits: int) -> list[int]:
    """The position k * 64 + n, in a tile of 16 x 64, of each code in the order in which words hold
    them: of lane l and warp w the columns l // 4 + 16 w + (0, 8), the rows 2 (l % 4) + (0, 1, 8, 9)
    of each."""
    inner = INTERLEAVED[bits]
    found = []
    for lane in range(32):
        for warp in range(4):
            codes = [
                (2 * (lane % 4) + k) * TILE_N + lane // 4 + 16 * warp + n
                for n in (0, 8)
                for k in (0, 1, 8, 9)
            ]
            for first in range(0, 8, len(inner)):
                found += [codes[first + place] for place in inner]
    return found


def to_marlin(codes: Tensor, bits: int) -> Tensor:
    """Codes [.., K, N] as int32 [.., K / 16, N * bits / 2]; K and N are multiples of 16 and 64."""
    tiles = codes.unflatten(-1, (-1, TILE_N)).unflatten(-3, (-1, TILE_K)).transpose(-3, -2)
    return pack(take_places(tiles.flatten(-2), marlin_order(bits), -1).flatten(-2), bits, -1)


def from_marlin(words: Tensor, bits: int) -> Tensor:
    """The inverse of `to_marlin`."""
    codes = unpack(words, bits, -1).unflatten(-1, (-1, TILE_K * TILE_N))
    tiles = codes.index_select(-1, index(inverse(marlin_order(bits)), words.device))
    rows = tiles.unflatten(-1, (TILE_K, TILE_N)).transpose(-3, -2)
    return rows.flatten(-2).flatten(-3, -2)


def scale_order(groups: int) -> list[int]:
    """The column of each scale in Marlin's order, within a run of columns; weights with one group
    have another order than those with several."""
    if groups > 1:
        return [i + 8 * j for i in range(8) for j in range(8)]
    return [2 * i + m for i in range(4) for m in (0, 1, 8, 9, 16, 17, 24, 25)]


def scales_from_marlin(scales: Tensor) -> Tensor:
    """Scales [.., G, N] from Marlin's order to the order of the columns."""
    return take_places(scales, inverse(scale_order(scales.shape[-2])), -1)


def zeros_from_marlin(words: Tensor, bits: int) -> Tensor:
    """Zero points [.., G, N] int32 of Marlin's words [.., G, N * bits / 32]."""
    interleaved = take_places(unpack(words, bits, -1), inverse(INTERLEAVED[bits]), -1)
    return take_places(interleaved, inverse(scale_order(2)), -1)


def group_of(width: int, groups: int, g_idx: Tensor | None, device: torch.device) -> Tensor:
    """[K] int64, the group of each row: g_idx if given, else groups of K / G consecutive rows."""
    if g_idx is not None and g_idx.numel():
        return g_idx.long()
    size = max(1, width // max(groups, 1))
    return (torch.arange(width, device=device) // size).clamp(max=max(groups - 1, 0))
