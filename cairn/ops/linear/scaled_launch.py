"""How products of codes of 8 bits are launched."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.linear.scaled_kernels import scaled_mm_kernel
from cairn.ops.moe.experts_launch import spread
from cairn.ops.moe.tuning import Tile

TILES = (
    (16, Tile(16, 64, 256, 4, 4)),
    (32, Tile(32, 64, 256, 4, 4)),
    (64, Tile(64, 64, 128, 4, 4)),
    (256, Tile(64, 128, 128, 4, 4)),
)
"""Rows up to which a tile serves."""
LARGE = Tile(128, 256, 128, 8, 3, 8, True)
_ALIGNED = 16
"""Bytes that a table's address and its lines' are multiples of."""


def accepts(a: Tensor, b: Tensor) -> bool:
    """Rows [M, K] and columns [K, N] with their numbers side by side, and a K of whole steps."""
    return (
        a.stride(1) == 1
        and b.stride(0) == 1
        and a.shape[1] > 0
        and (a.dtype == torch.int8 or a.device.type != "cuda" or gpu.knows_e4m3(a.device))
    )


def multiplies_codes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels multiply rows x, in 16 bits, with codes of a dtype on tensor cores."""
    fast = gpu.AVAILABLE and x.is_cuda and x.dtype != torch.float32
    return fast and (dtype == torch.int8 or gpu.knows_e4m3(x.device))


def tile_for(rows: int, numbers: int, device: torch.device) -> Tile:
    """What a program of a product [rows, numbers] computes."""
    tile = next((tile for most, tile in TILES if rows <= most), LARGE)
    return spread(tile, -(-rows // tile.rows), numbers, device)


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
) -> Tensor:
    """`scaled_mm_kernel`: a [M, K] and b [N, K] into out [M, N], a tile a program."""
    rows, width = a.shape
    numbers = b.shape[0]
    if not rows or not numbers:
        return out
    table = tile.table and _is_table(a) and _is_table(b)
    tiles = -(-rows // tile.rows)
    columns = -(-numbers // tile.columns)
    scaled_mm_kernel[(tiles * columns,)](
        a=_table(a, (tile.rows, tile.part)) if table else a,
        b=_table(b, (tile.columns, tile.part)) if table else b,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        rows=rows,
        numbers=numbers,
        width=width,
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        out_stride=out.stride(0),
        a_step=_step(a_scale),
        b_step=_step(b_scale),
        tiles=tiles,
        columns=columns,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.part,
        TILES=tile.together,
        INTEGER=a.dtype == torch.int8,
        TABLE=table,
        EVEN=width % tile.part == 0,
        PDL=gpu.supports_pdl(a.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _step(scale: Tensor) -> int:
    """How far scales are apart; 0 where there is one."""
    if scale.numel() == 1:
        return 0
    return next(
        stride for size, stride in zip(scale.shape, scale.stride(), strict=True) if size > 1
    )


def _is_table(x: Tensor) -> bool:
    step = x.stride(0)
    return gpu.supports_tma(x.device) and x.data_ptr() % _ALIGNED == 0 and step % _ALIGNED == 0


def _table(x: Tensor, block: tuple[int, int]) -> object:
    return gpu.blocks(x, tuple(x.shape), (x.stride(0), 1), block)
