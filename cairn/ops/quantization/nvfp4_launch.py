"""Launch of the kernel of rows in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.quantization.codes import E4M3
from cairn.ops.quantization.kernels import nvfp4_rows_kernel
from cairn.ops.quantization.nvfp4 import BLOCK, TILE_COLUMNS, padded

MAX_BLOCKS = 256
"""Blocks per program."""
BLOCKS_A_WARP, EXPERTS_A_WARP = 32, 128
"""Blocks per warp, without and with a search of the row's expert."""


def in_rows(x: Tensor, groups: int, *others: Tensor) -> bool:
    """Whether the kernels take x [.., K] with this many groups of rows."""
    few = groups <= gpu.MAX_GRID_YZ
    few = few and x.shape[-1] <= gpu.MAX_GRID_YZ * MAX_BLOCKS * BLOCK
    return few and x.stride(-1) == 1 and all(one.is_contiguous() for one in others)


def programs_of(columns: int, a_warp: int = BLOCKS_A_WARP) -> tuple[int, int, int]:
    """Blocks and warps per program, and programs per row, for this many columns of scales."""
    blocks = min(MAX_BLOCKS, gpu.next_power_of_2(columns))
    return blocks, max(1, blocks // a_warp), -(-columns // blocks)


def quantize(
    x: Tensor, global_scale: Tensor, mask: Tensor | None = None, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes [.., M, K / 2] uint8 and stored scales [.., M', S'] e4m3 of x.

    Args:
        x: [M, K] or [L, M, K], 2K if gated: [gate | up], of which silu(gate) * up is quantized. Any
            row stride; the stride of K is 1.
        global_scale: [L] float32, dense.
        mask: [L] int32, dense: rows in use, the others are 0. None: all.
    """
    *groups, rows, width = x.shape
    blocks = width // BLOCK // (1 + gated)
    padded_rows, padded_columns = padded(rows, blocks)
    codes = gpu.empty((*groups, rows, blocks * BLOCK // 2), torch.uint8, x.device)
    scales = gpu.empty((*groups, padded_rows, padded_columns), E4M3, x.device)
    own, warps, programs = programs_of(padded_columns)
    if scales.numel():
        nvfp4_rows_kernel[(padded_rows, programs, *groups)](
            x=x,
            codes=codes.view(torch.int32),
            scales=scales.view(torch.uint8),
            global_scale=global_scale,
            mask=mask,
            rows=rows,
            blocks=blocks,
            tiles=padded_columns // TILE_COLUMNS,
            x_group=x.stride(0) if groups else 0,
            x_row=x.stride(-2),
            T=own,
            GATED=gated,
            num_warps=warps,
        )
    return codes, scales
