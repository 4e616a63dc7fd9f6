"""Launch of 8-bit matrix products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.linear.scaled_kernels import scaled_mm_kernel
from cairn.ops.quantization.codes import E4M3


class Tile(NamedTuple):
    """Tile sizes of a program.

    Attributes:
        rows: rows of a per tile.
        columns: columns of the result per tile.
        part: elements along K per iteration.
        warps, stages: num_warps and num_stages.
        table: a and b are loaded by TMA.
        transposed: see `scaled_mm_kernel`.
    """

    rows: int
    columns: int
    part: int
    warps: int
    stages: int
    table: bool = False
    transposed: bool = False


NARROW = (Tile(16, 64, 256, 4, 4), Tile(16, 32, 256, 4, 6), Tile(16, 16, 256, 2, 6))
TRANSPOSED = (Tile(16, 64, 256, 4, 4, transposed=True), Tile(16, 64, 256, 4, 6, transposed=True))
"""Used instead of `NARROW` for e4m3 on devices with wgmma: up to 16% faster."""
TILES = (
    (16, NARROW),
    (32, (Tile(32, 64, 256, 4, 4), Tile(32, 32, 256, 4, 4))),
    (64, (Tile(64, 64, 128, 4, 4), Tile(64, 32, 256, 4, 4))),
    (256, (Tile(64, 128, 128, 4, 4),)),
)
"""(most rows, tiles): the first tile that gives every multiprocessor a program is taken, else the
last."""
LARGE = {E4M3: Tile(128, 256, 128, 8, 3, True), torch.int8: Tile(128, 256, 128, 8, 4, True)}
"""Tile for more rows, by the dtype of the codes."""
TOGETHER = 8
"""Tiles of rows that are multiplied with all columns before the next ones."""
_ALIGNED = 16
"""Alignment in bytes of a table's address and row stride."""


def accepts(a: Tensor, b: Tensor) -> bool:
    """Whether the kernel supports rows [M, K] and columns [K, N]: contiguous along K, which is a
    multiple of the step."""
    return (
        a.stride(1) == 1
        and b.stride(0) == 1
        and a.shape[1] > 0
        and (a.dtype == torch.int8 or a.device.type != "cuda" or gpu.supports_e4m3(a.device))
    )


def supports_8bit_gemm(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether tensor cores multiply 16-bit rows x with quantized values of an 8-bit dtype."""
    fast = gpu.AVAILABLE and x.is_cuda and x.dtype != torch.float32
    return fast and (dtype == torch.int8 or gpu.supports_e4m3(x.device))


def tile_for(rows: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile of a product [rows, outputs] of 8-bit codes."""
    tiles = next((tiles for most, tiles in TILES if rows <= most), (LARGE[dtype],))
    if tiles is NARROW and dtype == E4M3 and gpu.supports_wgmma(device):
        tiles = TRANSPOSED
    wanted = gpu.sm_count(device)
    fit = (tile for tile in tiles if -(-rows // tile.rows) * -(-outputs // tile.columns) >= wanted)
    return next(fit, tiles[-1])


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
) -> Tensor:
    """`scaled_mm_kernel`: a [M, K] and b [N, K] into out [M, N], one tile per program."""
    rows, width = a.shape
    outputs = b.shape[0]
    if not rows or not outputs:
        return out
    table = tile.table and _is_table(a) and _is_table(b)
    tiles = -(-rows // tile.rows)
    columns = -(-outputs // tile.columns)
    scaled_mm_kernel[(tiles * columns,)](
        a=_table(a, (tile.rows, tile.part)) if table else a,
        b=_table(b, (tile.columns, tile.part)) if table else b,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        rows=rows,
        outputs=outputs,
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
        TILES=TOGETHER,
        TRANSPOSED=tile.transposed,
        INTEGER=a.dtype == torch.int8,
        TABLE=table,
        EVEN=width % tile.part == 0,
        PDL=gpu.supports_pdl(a.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _step(scale: Tensor) -> int:
    """Stride of scales; 0 for a single one."""
    if scale.numel() == 1:
        return 0
    return next(
        stride for size, stride in zip(scale.shape, scale.stride(), strict=True) if size > 1
    )


def _is_table(x: Tensor) -> bool:
    step = x.stride(0)
    return gpu.supports_tma(x.device) and x.data_ptr() % _ALIGNED == 0 and step % _ALIGNED == 0


def _table(x: Tensor, block: tuple[int, int]) -> object:
    return gpu.tensor_descriptor(x, tuple(x.shape), (x.stride(0), 1), block)
