"""Kernel of products of single rows with matrices of experts: a program loads its whole part of a
matrix at once, where tiles for tensor cores would wait for one block after the other."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.moe.kernels.experts import BLOCK, gated, quantized
from cairn.ops.pdl import await_previous


@triton.jit
def matrix_rows(
    w, w_scale, row, rows, width, w_scale_row, BLOCKS: tl.constexpr, SCALED: tl.constexpr
):
    """Rows `row` [BN] of a matrix [BN, BLOCKS, 128], 0 from `rows` on, and their scales
    [BN, BLOCKS]."""
    block, lane = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    column = block[:, None] * BLOCK + lane[None, :]
    inside = (row < rows)[:, None, None] & (column < width)[None, :, :]
    at = w + row.to(tl.int64)[:, None, None] * width + column[None, :, :]
    tile = tl.load(at, mask=inside, other=0.0)
    scale = tl.full((row.shape[0], BLOCKS), 1.0, tl.float32)
    if SCALED:
        place = (row // BLOCK)[:, None] * w_scale_row + block[None, :]
        known = (row < rows)[:, None] & (block * BLOCK < width)[None, :]
        scale = tl.load(w_scale + place, mask=known, other=0.0)
    return tile, scale


@triton.jit
def product(tile, tile_scale, number, scale):
    """Rows [BN, BLOCKS, 128] times a vector [BLOCKS, 128], each with its scales: [BN] float32."""
    sums = tl.sum(tile.to(tl.float32) * number[None, :, :], 2)
    return tl.sum(sums * (tile_scale * scale[None, :]), 1)


@triton.jit(early=("w", "w_scale"))
def vectors_kernel(
    x, w, w_scale, out, owners, share, numbers, width, rows, x_stride, w_scale_expert,
    w_scale_row, out_stride, columns, limit,
    BN: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    SCALED: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[p, :numbers] = x[p // share] with the matrix of expert owners[p], in float32; rows of
    negative owners are not written. SCALED: x is quantised first.

    Args:
        w, w_scale, KIND, CLAMPED, limit: as of `experts_kernel`, matrices contiguous.
        owners: None: there is one expert.
        columns: programs of a row; each computes BN numbers.
        BLOCKS: of 128 numbers in a row of x, padded to a power of two.
        PDL: as in `await_previous`.
    """
    program = tl.program_id(0)
    place, part = program // columns, program % columns
    expert = tl.full((), 0, tl.int64)
    if owners is not None:
        await_previous(PDL)
        expert = tl.load(owners + place).to(tl.int64)
        if expert < 0:
            return
    w += expert * rows * width
    if SCALED:
        w_scale += expert * w_scale_expert
    row = part * BN + tl.arange(0, BN)
    # Loads of the matrix come first: they take longest.
    left, left_scale = matrix_rows(w, w_scale, row, numbers, width, w_scale_row, BLOCKS, SCALED)
    if KIND != "":
        w += tl.cast(numbers, tl.int64) * width
        if SCALED:
            w_scale += (numbers + BLOCK - 1) // BLOCK * w_scale_row
        right, right_scale = matrix_rows(
            w, w_scale, row, numbers, width, w_scale_row, BLOCKS, SCALED
        )
    await_previous(PDL)
    column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x += (place // share).to(tl.int64) * x_stride
    number = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
    scale = tl.full((BLOCKS,), 1.0, tl.float32)
    if SCALED:
        code, scale = quantized(number, HARDWARE)
        number = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    result = product(left, left_scale, number, scale)
    if KIND != "":
        other = product(right, right_scale, number, scale)
        result = gated(result, other, limit, KIND, CLAMPED)
    to = out + place.to(tl.int64) * out_stride + row
    tl.store(to, result.to(out.dtype.element_ty), mask=row < numbers)
