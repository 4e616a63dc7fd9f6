"""NVFP4: 4-bit values (e2m1) in blocks of 16, each block with an e4m3 scale.

A value is code * S / g, with the block's scale S and the tensor's global scale g. Two codes share a
byte, the first in its low half. The codes 0 .. 7 are 0, .5, 1, 1.5, 2, 3, 4 and 6; bit 3 is the
sign.

Scales [M, S] are stored in tiles as the matrix units of Blackwell read them: padded with zeros to
multiples of 128 rows and 4 columns, the scale (m, s) lies at
(m // 128) * (S' / 4) * 512 + (s // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + s % 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.quantization.codes import E4M3, e4m3, inverse

BLOCK = 16
LARGEST = 6.0
TILE_ROWS, TILE_COLUMNS = 128, 4


def expect_input(name: str, argument: str, x: Tensor, dims: int | None, factor: int = 1) -> None:
    """Raise BadArgument unless x [..., factor * K] is float and has whole blocks of 16.

    Args:
        dims: of x; None: at least one.
    """
    expect(name, argument, x, None if dims is None else (None,) * dims, FLOATS)
    if not x.dim() or not x.shape[-1] or x.shape[-1] % (factor * BLOCK):
        refuse(name, argument, f"has shape {list(x.shape)}, no rows of blocks of {BLOCK}")


def codes(size: Tensor) -> Tensor:
    """Magnitudes as e2m1 codes: to the nearest, ties to the even code, at most 6; NaN is 6."""
    code = torch.where(size.isnan(), 7, 0)
    # Midpoints between codes; ties go to the even code, so the comparison is > or >= in turn.
    for above, least in ((0.25, 0.75), (1.25, 1.75), (2.5, 3.5)):
        code = code + (size > above) + (size >= least)
    return code + (size > 5.0)


def values(code: Tensor) -> Tensor:
    """float32 of e2m1 codes 0 .. 15, integers."""
    size, exponent = code & 7, code >> 1 & 3
    # Codes >= 1: the lowest bit adds half a power of two; below, it is the value 0.5.
    wide = (2 + (size & 1)) * torch.pow(2.0, exponent.float() - 2)
    found = torch.where(exponent == 0, 0.5 * size, wide)
    return torch.where(code & 8 > 0, -found, found)


def unpacked(pairs: Tensor) -> Tensor:
    """float32 [.., K] of pairs of codes [.., K / 2] uint8, the first in its low half."""
    both = pairs.int()
    return values(torch.stack((both & 15, both >> 4), dim=-1).flatten(-2))


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [.., K / 2] uint8 and scales [.., K / 16] e4m3 of x [.., K].

    S = e4m3(g * (amax / 6)); the codes are of x / (S / g), 0 for S = 0, with the sign bit of x, NaN
    or not. Both quotients are products with float32 reciprocals.

    Args:
        global_scale: g, float32, broadcast against [.., 1].
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1)
    scale = e4m3(global_scale * (largest * (1.0 / LARGEST)))
    factor = inverse(scale.float() * inverse(global_scale))
    found = codes(blocks.abs() * factor.unsqueeze(-1)) + 8 * torch.signbit(blocks)
    pairs = found.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).flatten(-2), scale


def padded(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that scales are padded to."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def tiled(scales: Tensor) -> Tensor:
    """Scales [.., M, S] e4m3 in the order in which they are stored, [.., M', S']."""
    rows, columns = padded(*scales.shape[-2:])
    behind = (0, columns - scales.shape[-1], 0, rows - scales.shape[-2])
    raw = torch.nn.functional.pad(scales.view(torch.uint8), behind)
    tiles = raw.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, 4, 32))
    # From the order [.., tile row, 4, 32, tile column, 4].
    order = tiles.transpose(-4, -2)
    laid: Tensor = order.reshape(*scales.shape[:-2], rows, columns).view(E4M3)
    return laid


def untiled(stored: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `tiled`: scales [.., rows, columns] of any dtype of one byte."""
    padded_rows, padded_columns = stored.shape[-2:]
    raw = stored.view(torch.uint8).flatten(-2)
    tiles = raw.unflatten(
        -1, (padded_rows // TILE_ROWS, padded_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    )
    laid = tiles.transpose(-4, -2).reshape(*stored.shape[:-2], padded_rows, padded_columns)
    return laid[..., :rows, :columns].view(stored.dtype)


def blank(x: Tensor, rows: int, scale_rows: int, *groups: int) -> tuple[Tensor, Tensor]:
    """Shapes alone: codes [*groups, rows, K / 2] and stored scales [*groups, .., ..] of x [.., K].

    Args:
        scale_rows: rows of scales, before they are padded.
    """
    width = x.shape[-1]
    sizes = padded(scale_rows, width // BLOCK)
    codes = x.new_empty((*groups, rows, width // 2), dtype=torch.uint8)
    return codes, x.new_empty((*groups, *sizes), dtype=E4M3)
