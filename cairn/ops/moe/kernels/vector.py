"""Kernel of the product of one row with an fp8 matrix (GEMV): a program loads its whole part of the
matrix at once, where a tensor-core tile would wait for one block after another."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.moe.kernels.experts import BLOCK, quantized
from cairn.ops.pdl import await_previous


@triton.jit(early=("w", "w_scale"))
def vector_kernel(
    x, w, w_scale, out, outputs, width, w_scale_row,
    BN: tl.constexpr, BLOCKS: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [outputs] = w [outputs, width] times x [width], which is quantised; BN rows of w per
    program.

    Args:
        w, w_scale: as in `experts_kernel`; w is contiguous.
        BLOCKS: number of blocks of 128 columns, padded to a power of two.
        PDL: as in `await_previous`.
    """
    row, block = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < outputs)[:, None, None] & (column < width)[None, :, :]
    at = w + row.to(tl.int64)[:, None, None] * width + column[None, :, :]
    tile = tl.load(at, mask=inside, other=0.0)
    known = (row < outputs)[:, None] & (block * BLOCK < width)[None, :]
    at = w_scale + (row // BLOCK)[:, None] * w_scale_row + block[None, :]
    tile_scale = tl.load(at, mask=known, other=0.0)
    await_previous(PDL)
    number = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
    code, scale = quantized(number, HARDWARE)
    number = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    sums = tl.sum(tile.to(tl.float32) * number[None, :, :], 2)
    result = tl.sum(sums * (tile_scale * scale[None, :]), 1)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < outputs)
