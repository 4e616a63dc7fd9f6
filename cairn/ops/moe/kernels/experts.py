"""Kernel of grouped matrix products: each tile of rows is multiplied with the matrix of its expert.

In fp8 an expert's matrix has a scale for each block of 128 x 128, and rows have one for every 128
elements. Tensor cores accumulate the products within a block; sums over blocks are in float32.
"""

from __future__ import annotations

from cairn.ops.activation.kernels import activated
from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous
from cairn.ops.quantization.kernels import code_of, inverse_of, largest_bits

GROUP = 128
"""Elements of a row, and rows of a matrix, per scale."""
BLOCK = tl.constexpr(GROUP) if tl is not None else GROUP
LEAST = tl.constexpr(1e-10) if tl is not None else 1e-10


@triton.jit
def quantized(number, HARDWARE: tl.constexpr):
    """float32 rows [M, 128] as e4m3 codes (uint8), and their scales [M]."""
    largest = largest_bits(number, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.where(largest < LEAST, LEAST, largest), 448.0)
    code = code_of(
        number * inverse_of(scale)[:, None], -448.0, 448.0, "e4m3", not HARDWARE, HARDWARE
    )
    return code, scale


@triton.jit
def tile_of(program, tiles, columns, TILES: tl.constexpr):
    """Indices of a program's tile of rows and tile of columns. TILES tiles of rows are multiplied
    with all columns before the next ones, so that rows and matrices are read again from L2."""
    span = TILES * columns
    first = program // span * TILES
    count = tl.minimum(tiles - first, TILES)
    return first + program % span % count, program % span // count


@triton.jit
def matrix_tile(
    w, row, column, rows, width, w_stride, BN: tl.constexpr, BK: tl.constexpr,
    TABLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Columns `column` .. + BK of matrix rows `row` .. + BN: [BK, BN]. Rows beyond `rows` hold
    arbitrary values."""
    if TABLE:
        tile = w.load([row, column]).T
    else:
        number = row + tl.arange(0, BN)
        at = column + tl.arange(0, BK)
        inside = (number < rows)[None, :]
        if not EVEN:
            inside = inside & (at < width)[:, None]
        address = w + number.to(tl.int64)[None, :] * w_stride + at[:, None]
        tile = tl.load(address, mask=inside, other=0.0)
    return tile


@triton.jit
def rows_tile(a, row, inside, column, width, a_stride, BK: tl.constexpr, EVEN: tl.constexpr):
    """Load columns `column` .. `column` + BK - 1 of the rows at `row`: [BM, BK], 0 in rows that are
    not inside."""
    at = column + tl.arange(0, BK)
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (at < width)[None, :]
    return tl.load(a + row[:, None] * a_stride + at[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(
    out, out_scale, row, inside, column, value, outputs, out_stride, scale_stride, scale_step,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store float32 values [BM, BN] from column `column` on: rounded to out's dtype or, with
    out_scale, as e4m3 with a scale per row (BN is 128)."""
    at = column + tl.arange(0, value.shape[1])
    mask = inside[:, None] & (at < outputs)[None, :]
    to = out + row[:, None] * out_stride + at[None, :]
    if out_scale is None:
        tl.store(to, value.to(out.dtype.element_ty), mask=mask)
    else:
        code, scale = quantized(tl.where(mask, value, 0.0), HARDWARE)
        tl.store(to, code, mask=mask)
        at = out_scale + row * scale_stride + (column // BLOCK).to(tl.int64) * scale_step
        tl.store(at, scale, mask=inside)


@triton.jit
def sum_products(
    a, w, a_scale, w_scale, row, inside, first, second, rows, width, a_stride, w_stride,
    scale_step, second_scale,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PAIR: tl.constexpr,
    SCALED: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    HARDWARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products [BM, BN] of rows of a with BN rows of a matrix from row `first` on and, with PAIR,
    also with those from row `second` on.

    Args:
        a: address of the rows.
        a_scale, w_scale: SCALED: addresses of the scales of the rows [BM] and of the block of row
            `first`. From one block of columns to the next, scales of rows are scale_step elements
            apart and those of the matrix 1. Without a_scale, rows are quantised here.
        second_scale: elements from the scales of row `first` to those of row `second`.
        STAGES: stages of the loop, with which scales are prefetched too; None: num_stages of the
            launch, which prefetches tiles only.
    """
    # Of loads that do not feed a tl.dot, the compiler pipelines tensors but not scalars.
    line = row * 0 if STAGES is not None else 0
    left = tl.zeros((BM, BN), tl.float32)
    right = tl.zeros((BM, BN), tl.float32)
    for column in tl.range(0, width, BK, num_stages=STAGES):
        x = rows_tile(a, row, inside, column, width, a_stride, BK, EVEN)
        gate = matrix_tile(w, first, column, rows, width, w_stride, BN, BK, TABLE, EVEN)
        if SCALED:
            block = column // BLOCK
            if a_scale is None:
                code, scale = quantized(x.to(tl.float32), HARDWARE)
                x = code.to(tl.float8e4nv, bitcast=True)
            else:
                scale = tl.load(a_scale + block * scale_step, mask=inside, other=0.0)
            own = (scale * tl.load(w_scale + block + line))[:, None]
            left += tl.dot(x, gate) * own
            if PAIR:
                up = matrix_tile(w, second, column, rows, width, w_stride, BN, BK, TABLE, EVEN)
                own = (scale * tl.load(w_scale + second_scale + block + line))[:, None]
                right += tl.dot(x, up) * own
        else:
            left = tl.dot(x, gate, left, input_precision=PRECISION)
            if PAIR:
                up = matrix_tile(w, second, column, rows, width, w_stride, BN, BK, TABLE, EVEN)
                right = tl.dot(x, up, right, input_precision=PRECISION)
    return left, right


@triton.jit
def rows_of(
    tile, order, begins, ends, pairs, share, count,
    BM: tl.constexpr, GATHERED: tl.constexpr, SCATTERED: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Rows [BM] of a that a tile reads and of out that it writes, int64, and a mask of those that
    exist; see `experts_kernel`."""
    line = tl.arange(0, BM)
    if SINGLE:
        row = tile + line
        inside = line < 1
    elif begins is not None:
        row = tl.load(begins + tile) + line
        inside = row < tl.load(ends + tile)
    else:
        row = tile * BM + line
        inside = row < count
    pair = row
    if order is not None:
        pair = tl.load(order + row, mask=inside, other=pairs)
        inside = inside & (pair < pairs)
    source, target = row.to(tl.int64), row.to(tl.int64)
    if GATHERED:
        source = (pair // share).to(tl.int64)
    if SCATTERED:
        target = pair.to(tl.int64)
    return source, target, inside


@triton.jit
def owner_of(row, offsets, sizes, size_stride, experts, EP: tl.constexpr):
    """The expert e with offsets[e] <= row < offsets[e] + sizes[e, 0]; -1 if no expert has the
    row."""
    expert = tl.arange(0, EP)
    inside = expert < experts
    first = tl.load(offsets + expert, mask=inside, other=0)
    count = tl.load(sizes + expert * size_stride, mask=inside, other=0)
    return tl.max(tl.where((first <= row) & (row < first + count), expert, -1), 0)


@triton.jit(early=(), do_not_specialize=["pairs", "count", "tiles", "a_scale_step"])
def experts_kernel(
    a, a_scale, w, w_scale, out, out_scale, order, owners, used, begins, ends, sizes, size_stride,
    experts,
    pairs, share, outputs, width, rows, a_stride, a_scale_stride, a_scale_step, w_stride,
    w_scale_expert, w_scale_row, out_stride, out_scale_stride, out_scale_step, count, tiles,
    columns, limit,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, SCALED: tl.constexpr, GATHERED: tl.constexpr,
    SCATTERED: tl.constexpr, SINGLE: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, HARDWARE: tl.constexpr, STAGES: tl.constexpr, EP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [R, outputs] = each row of a times the matrix of its expert.

    Tile t of rows has the expert owners[t] and is skipped if that is negative; owners None: there
    is one expert. Its rows are t * BM .. t * BM + BM - 1, below `count`; with `begins`, they start
    at begins[t] and end before ends[t]; SINGLE: row t only. With `sizes`, the expert of row t is
    found by `owner_of` among `experts` experts (padded to EP), with begins as offsets.

    Args:
        a: [rows, width], or codes with a_scale [rows, blocks of columns]; rows without a_scale are
            quantised here if the matrices are codes.
        w: matrices [E, rows, width], as a tensor descriptor of blocks [BN, BK] (TABLE) or by
            address. KIND "": rows is `outputs`. Else rows is 2 * outputs, and act(first half of the
            product) * second half is stored, with the activation KIND. CLAMPED: the first half is
            clamped to at most `limit`, the second to -limit .. limit.
        w_scale: SCALED: scales of blocks of 128 x 128 of the matrices; blocks of the second half
            begin at its first row.
        out, out_scale: the result or, with out_scale, codes and scales per 128 elements (BN is
            128).
        order: pairs in the order of rows; values of `pairs` or more are padding. GATHERED: the row
            of a is pair // share. SCATTERED: the row of out is the pair. Else both are the tile's
            rows.
        used: [1], rows in use, which gives the number of tiles; None: `tiles`.
        columns: tiles of columns.
        STAGES: as in `sum_products`.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    if used is not None:
        tiles = tl.load(used) // BM
    program = tl.program_id(0)
    if program >= tiles * columns:
        return
    tile, column = tile_of(program, tiles, columns, TILES)
    expert = tl.full((), 0, tl.int64)
    if owners is not None:
        expert = tl.load(owners + tile).to(tl.int64)
    elif sizes is not None:
        expert = owner_of(tile, begins, sizes, size_stride, experts, EP).to(tl.int64)
    if expert < 0:
        return
    source, target, inside = rows_of(
        tile, order, begins, ends, pairs, share, count, BM, GATHERED, SCATTERED, SINGLE
    )
    number = column * BN
    first = number
    if TABLE:
        first += (expert * rows).to(tl.int32)
    else:
        w += expert * rows * w_stride
    if SCALED:
        w_scale += expert * w_scale_expert + number // BLOCK * w_scale_row
    if a_scale is not None:
        a_scale += source * a_scale_stride
    half = (outputs + BLOCK - 1) // BLOCK * w_scale_row
    left, right = sum_products(
        a, w, a_scale, w_scale, source, inside, first, first + outputs, rows, width, a_stride,
        w_stride, a_scale_step, half,
        BM, BN, BK, KIND != "", SCALED, TABLE, EVEN, PRECISION, HARDWARE, STAGES,
    )  # fmt: skip
    if CLAMPED:
        left = tl.minimum(left, limit, propagate_nan=tl.PropagateNan.ALL)
        right = tl.clamp(right, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if KIND != "":
        left = activated(left, KIND) * right
    store_tile(
        out, out_scale, target, inside, number, left, outputs, out_stride, out_scale_stride,
        out_scale_step, HARDWARE,
    )  # fmt: skip
