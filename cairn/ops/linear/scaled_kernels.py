"""Kernel of 8-bit matrix products with a scale per row of both operands."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.moe.kernels.experts import matrix_tile, rows_tile, tile_of
from cairn.ops.pdl import await_previous


@triton.jit(early=(), do_not_specialize=["rows", "tiles"])
def scaled_mm_kernel(
    a, b, a_scale, b_scale, bias, out, rows, outputs, width, a_stride, b_stride, out_stride,
    a_step, b_step, tiles, columns,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    TRANSPOSED: tl.constexpr, INTEGER: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, outputs] = (a b^T) * a_scale[m] * b_scale[n] + bias[n].

    Args:
        a: [rows, width], and b: [outputs, width], e4m3 or (INTEGER) int8; both as tensor
            descriptors with blocks [BM, BK] and [BN, BK] (TABLE) or by address.
        a_scale, b_scale: float32, with strides a_step and b_step; stride 0: one scale for all.
        bias: [outputs], or None.
        tiles, columns: number of tiles of rows and of outputs.
        TRANSPOSED: compute the transposed product, with b's rows as the first operand: wgmma
            multiplies 64 rows with any multiple of 8 columns.
        EVEN: width is a multiple of BK.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    tile, column = tile_of(tl.program_id(0), tiles, columns, TILES)
    row = tile * BM + tl.arange(0, BM)
    inside = row < rows
    number = column * BN + tl.arange(0, BN)
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    if TRANSPOSED:
        total = tl.zeros((BN, BM), kind)
    else:
        total = tl.zeros((BM, BN), kind)
    for at in range(0, width, BK):
        if TABLE:
            x = a.load([tile * BM, at])
        else:
            x = rows_tile(a, row.to(tl.int64), inside, at, width, a_stride, BK, EVEN)
        w = matrix_tile(b, column * BN, at, outputs, width, b_stride, BN, BK, TABLE, EVEN)
        if TRANSPOSED:
            x, w = w.T, x.T
        if INTEGER:
            total = tl.dot(x, w, total, out_dtype=tl.int32)
        else:
            # Accumulate outside the tensor core, whose fp8 accumulator has fewer bits than float32.
            total += tl.dot(x, w)
    if TRANSPOSED:
        total = total.T
    there = number < outputs
    left = tl.load(a_scale + row * a_step, mask=inside, other=0.0)
    right = tl.load(b_scale + number * b_step, mask=there, other=0.0)
    value = total.to(tl.float32) * left[:, None] * right[None, :]
    if bias is not None:
        value += tl.load(bias + number, mask=there, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * out_stride + number[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])
