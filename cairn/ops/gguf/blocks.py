"""Dequantisation of GGUF blocks (llama.cpp's formats) in PyTorch.

A row is blocks of 32 or 256 elements, each with its scales. Operations are in the order of the
`gguf` package, so that float32 results are equal. In IQ1, IQ2 and IQ3 a code is the index of a grid
point, a group of 4 or 8 values; the grids come from that package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.errors import BadConfig

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""


class Kind(NamedTuple):
    """A format: its name, the numbers and bytes of a block, and the function from blocks [n, bytes]
    to their values [n, elements] float32."""

    name: str
    elements: int
    bytes: int
    values: Callable[[Tensor], Tensor]


def dequantised(weight: Tensor, kind: Kind) -> Tensor:
    """Values [.., K] float32 of rows of blocks [.., K / elements * bytes] uint8."""
    blocks = weight.reshape(-1, kind.bytes)
    width = weight.shape[-1] // kind.bytes * kind.elements
    return kind.values(blocks).reshape(*weight.shape[:-1], width)


def _f16(b: Tensor, at: int) -> Tensor:
    """[n, 1] float32 of the float16 at byte `at`."""
    return b[:, at : at + 2].contiguous().view(torch.float16).float()


def _u16(b: Tensor, at: int, count: int) -> Tensor:
    pairs = b[:, at : at + 2 * count].int().unflatten(1, (count, 2))
    return pairs[..., 0] | pairs[..., 1] << 8


def _u32(b: Tensor, at: int, count: int) -> Tensor:
    bytes_ = b[:, at : at + 4 * count].long().unflatten(1, (count, 4))
    return bytes_[..., 0] | bytes_[..., 1] << 8 | bytes_[..., 2] << 16 | bytes_[..., 3] << 24


def _i(b: Tensor, count: int = 256) -> Tensor:
    """0 .. count - 1."""
    return torch.arange(count, device=b.device)


def _halves(b: Tensor, at: int) -> Tensor:
    """[n, 32] nibbles of 16 bytes: all low nibbles, then all high nibbles."""
    q = b[:, at : at + 16].int()
    return torch.cat((q & 15, q >> 4), dim=1)


def _nibbles(b: Tensor, at: int, count: int) -> Tensor:
    """[n, count] nibbles of bytes in order, the low nibble of each byte first."""
    q = b[:, at : at + count // 2].int()
    return torch.stack((q & 15, q >> 4), dim=-1).flatten(1)


def _fifth(b: Tensor, at: int) -> Tensor:
    """[n, 32]: the fifth bit of each code, 0 or 16, from the 32-bit word at byte `at`."""
    return (_u32(b, at, 1) >> _i(b, 32) & 1).int() << 4


def _q4_0(b: Tensor) -> Tensor:
    return _f16(b, 0) * (_halves(b, 2) - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _f16(b, 0) * _halves(b, 4) + _f16(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _f16(b, 0) * ((_halves(b, 6) | _fifth(b, 2)) - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _f16(b, 0) * (_halves(b, 8) | _fifth(b, 4)) + _f16(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _f16(b, 0) * b[:, 2:].contiguous().view(torch.int8)


def _twos(b: Tensor, at: int) -> Tensor:
    """[n, 256] codes of 2 bits, 128 in 32 bytes: bits 0 and 1 of all bytes, then bits 2 and 3, and
    so on."""
    i = _i(b)
    return b[:, at + 32 * (i // 128) + i % 32].int() >> 2 * (i % 128 // 32) & 3


def _q2_k(b: Tensor) -> Tensor:
    s = b[:, _i(b) // 16].int()
    return _f16(b, 80) * (s & 15) * _twos(b, 16) - _f16(b, 82) * (s >> 4)


def _q3_k(b: Tensor) -> Tensor:
    i, s = _i(b), b[:, 96:108].int()
    g = _i(b, 16)
    low = torch.where(g < 8, s[:, g % 8] & 15, s[:, g % 8] >> 4)
    scale = (low | (s[:, 8 + g % 4] >> 2 * (g // 4) & 3) << 4) - 32
    unset = (b[:, i % 32].int() >> i // 32 & 1) == 0
    q = _twos(b, 32) - 4 * unset
    return _f16(b, 108) * scale[:, i // 16] * q


def _scales_of_8(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8] of Q4_K and Q5_K, of 6 bits."""
    s = b[:, 4:16].int()
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    return scale, torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)


def _halves_of_32(b: Tensor, at: int) -> Tensor:
    """[n, 256] nibbles, 64 in 32 bytes: all low ones, then all high ones."""
    i = _i(b)
    return b[:, at + 32 * (i // 64) + i % 32].int() >> 4 * (i // 32 % 2) & 15


def _q4_k(b: Tensor) -> Tensor:
    scale, least = (x.repeat_interleave(32, dim=1) for x in _scales_of_8(b))
    return _f16(b, 0) * scale * _halves_of_32(b, 16) - _f16(b, 2) * least


def _q5_k(b: Tensor) -> Tensor:
    i = _i(b)
    scale, least = (x.repeat_interleave(32, dim=1) for x in _scales_of_8(b))
    q = _halves_of_32(b, 48) | (b[:, 16 + i % 32].int() >> i // 32 & 1) << 4
    return _f16(b, 0) * scale * q - _f16(b, 2) * least


def _q6_k(b: Tensor) -> Tensor:
    i = _i(b)
    h, r = i // 128, i % 128
    low = b[:, 64 * h + r % 64].int() >> 4 * (r // 64) & 15
    high = b[:, 128 + 32 * h + r % 32].int() >> 2 * (r // 32) & 3
    scale = b[:, 192:208].contiguous().view(torch.int8)[:, i // 16]
    return _f16(b, 208) * scale * ((low | high << 4) - 32)


@functools.cache
def _grid(name: str) -> Any:
    """Points [count, 4 or 8] of a format, a numpy array."""
    try:
        quants: Any = importlib.import_module("gguf.quants")
    except ImportError:
        raise BadConfig(
            f"blocks of {name} need the grids of the package gguf, which is not installed",
            "pip install gguf",
        ) from None
    kind = getattr(quants, name)
    kind.init_grid()
    return kind.grid.reshape(kind.grid_shape)


def _points(name: str, index: Tensor) -> Tensor:
    """[n, count * 4 or 8] float32: the values of the grid points at `index` [n, count]."""
    grid = torch.from_numpy(_grid(name)).to(index.device)
    return grid[index.long()].flatten(1)


def _signs(code: Tensor) -> Tensor:
    """[n, 8 * count] of +1 and -1 from codes of 7 bits; the eighth sign is such that the number of
    minus signs is even."""
    bit = code.unsqueeze(-1) >> _i(code, 8) & 1
    bit[..., 7] = bit[..., :7].sum(-1) & 1
    return (1 - 2 * bit).flatten(1)


def _plain_signs(code: Tensor) -> Tensor:
    """[n, 8 * count] of +1 and -1 from codes of 8 bits."""
    return (1 - 2 * (code.unsqueeze(-1) >> _i(code, 8) & 1)).flatten(1)


def _of_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Scale [n, 8] and signs [n, 256] of 8 words: four times 7 bits of signs, and 4 of scale."""
    seven = words.unsqueeze(-1) >> 7 * _i(words, 4) & 127
    return words >> 28, _signs(seven.flatten(1))


def _iq2_xxs(b: Tensor) -> Tensor:
    both = b[:, 2:].unflatten(1, (8, 8))
    scale, signs = _of_words(_u32(both[..., 4:].flatten(1), 0, 8))
    factor = _f16(b, 0) * (0.5 + scale) * 0.25
    points = _points("IQ2_XXS", both[..., :4].flatten(1))
    return factor.repeat_interleave(32, dim=1) * points * signs


def _iq2_xs(b: Tensor) -> Tensor:
    w = _u16(b, 2, 32)
    factor = _f16(b, 0) * (0.5 + _nibbles(b, 66, 16)) * 0.25
    points = _points("IQ2_XS", w & 511)
    return factor.repeat_interleave(16, dim=1) * points * _signs(w >> 9)


def _iq3_xxs(b: Tensor) -> Tensor:
    scale, signs = _of_words(_u32(b, 66, 8))
    factor = _f16(b, 0) * (0.5 + scale) * 0.5
    return factor.repeat_interleave(32, dim=1) * _points("IQ3_XXS", b[:, 2:66]) * signs


def _iq1_s(b: Tensor) -> Tensor:
    w = _u16(b, 34, 8)
    high = w.unsqueeze(-1) >> 3 * _i(b, 4) & 7
    points = _points("IQ1_S", b[:, 2:34].int() | high.flatten(1) << 8)
    factor = _f16(b, 0) * (2 * (w >> 12 & 7) + 1)
    shift = torch.where(w >= 1 << 15, -0.125, 0.125)
    return factor.repeat_interleave(32, dim=1) * (points + shift.repeat_interleave(32, dim=1))


def _levels(codes: Tensor) -> Tensor:
    table = torch.tensor(LEVELS, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def _iq4_nl(b: Tensor) -> Tensor:
    return _f16(b, 0) * _levels(_halves(b, 2))


def _iq3_s(b: Tensor) -> Tensor:
    ninth = b[:, 66:74].int().unsqueeze(-1) >> _i(b, 8) & 1
    points = _points("IQ3_S", b[:, 2:66].int() | ninth.flatten(1) << 8)
    factor = _f16(b, 0) * (1 + 2 * _nibbles(b, 106, 8))
    signs = _plain_signs(b[:, 74:106].int())
    return factor.repeat_interleave(32, dim=1) * points * signs


def _iq2_s(b: Tensor) -> Tensor:
    high = b[:, 66:74].int().unsqueeze(-1) >> 2 * _i(b, 4) & 3
    points = _points("IQ2_S", b[:, 2:34].int() | high.flatten(1) << 8)
    factor = _f16(b, 0) * (0.5 + _nibbles(b, 74, 16)) * 0.25
    signs = _plain_signs(b[:, 34:66].int())
    return factor.repeat_interleave(16, dim=1) * points * signs


def _iq4_xs(b: Tensor) -> Tensor:
    high = _u16(b, 2, 1) >> 2 * _i(b, 8) & 3
    factor = _f16(b, 0) * ((_nibbles(b, 4, 8) | high << 4) - 32)
    i = _i(b)
    codes = b[:, 8 + 16 * (i // 32) + i % 16].int() >> 4 * (i % 32 // 16) & 15
    return factor.repeat_interleave(32, dim=1) * _levels(codes)


def _iq1_m(b: Tensor) -> Tensor:
    w = _u16(b, 48, 4)
    parts = (w >> 12) << 4 * _i(b, 4)
    bits = parts.sum(1, keepdim=True).to(torch.int32)
    # As a signed 16-bit integer.
    half = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
    d = half.view(torch.float16).float()
    code = _nibbles(b, 32, 32)
    points = _points("IQ1_M", b[:, :32].int() | (code & 7) << 8)
    scale = (w.unsqueeze(-1) >> 3 * _i(b, 4) & 7).flatten(1)
    factor = (d * (2 * scale + 1)).repeat_interleave(16, dim=1)
    shift = torch.where(code & 8 > 0, -0.125, 0.125).repeat_interleave(8, dim=1)
    return factor * (points + shift)


KINDS = {
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    6: Kind("Q5_0", 32, 22, _q5_0),
    7: Kind("Q5_1", 32, 24, _q5_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    10: Kind("Q2_K", 256, 84, _q2_k),
    11: Kind("Q3_K", 256, 110, _q3_k),
    12: Kind("Q4_K", 256, 144, _q4_k),
    13: Kind("Q5_K", 256, 176, _q5_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
    16: Kind("IQ2_XXS", 256, 66, _iq2_xxs),
    17: Kind("IQ2_XS", 256, 74, _iq2_xs),
    18: Kind("IQ3_XXS", 256, 98, _iq3_xxs),
    19: Kind("IQ1_S", 256, 50, _iq1_s),
    20: Kind("IQ4_NL", 32, 18, _iq4_nl),
    21: Kind("IQ3_S", 256, 110, _iq3_s),
    22: Kind("IQ2_S", 256, 82, _iq2_s),
    23: Kind("IQ4_XS", 256, 136, _iq4_xs),
    29: Kind("IQ1_M", 256, 56, _iq1_m),
}
"""GGUF's type id -> the format."""
