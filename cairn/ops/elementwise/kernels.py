"""Kernels of concatenation, float8 casts, positions and the Hadamard transform."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous
from cairn.ops.quantization.kernels import fp8_by_integers


@triton.jit(early=())
def concat_kernel(
    first, second, out, elements,
    first_stride, first_head_stride, second_stride, second_head_stride, out_stride, out_head_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[token, head] = [first [FIRST] | second [SECOND]]: BLOCK elements of a token, which are
    contiguous in out. A token has PARTS programs. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, part = row_and_part(PARTS)
    number = part * BLOCK + tl.arange(0, BLOCK)
    head = number // (FIRST + SECOND)
    column = number % (FIRST + SECOND)
    inside = number < elements
    in_first = column < FIRST
    one = first + token * first_stride + head * first_head_stride + column
    other = second + token * second_stride + head * second_head_stride + (column - FIRST)
    value = tl.load(one, mask=inside & in_first, other=0.0)
    value = tl.where(in_first, value, tl.load(other, mask=inside & (column >= FIRST), other=0.0))
    tl.store(out + token * out_stride + head * out_head_stride + column, value, mask=inside)


@triton.jit
def fp8_code(number, E4M3: tl.constexpr, HARDWARE: tl.constexpr):
    """The byte of a float32 as float8 e4m3 or e5m2. HARDWARE: the device converts to both
    formats."""
    if HARDWARE:
        most: tl.constexpr = 448.0 if E4M3 else 57344.0
        number = tl.where(number < -most, -most, number)
        number = tl.where(number > most, most, number)
        kind: tl.constexpr = tl.float8e4nv if E4M3 else tl.float8e5
        code = number.to(kind).to(tl.uint8, bitcast=True)
    else:
        code = fp8_by_integers(number, E4M3).to(tl.uint8)
    return code


@triton.jit(early=())
def fp8_kernel(
    x, out, scale_inv, x_stride, out_stride, width, blocks,
    BLOCK: tl.constexpr, E4M3: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = the bytes of x[row] * scale_inv; a row has `blocks` programs. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    row, part = row_and_part(blocks)
    column = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    number = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    code = fp8_code(number * scale_inv, E4M3, HARDWARE)
    tl.store(out + row * out_stride + column, code, mask=inside)


@triton.jit(early=())
def downcast_kernel(
    k, v, k_out, v_out, k_scale, v_scale, location, mult, offset,
    k_stride, v_stride, k_out_stride, v_out_stride, width,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row location[token] * mult + offset of k_out = the bytes of k[token] / k_scale; so for v. A
    negative location is skipped. A token has BLOCKS programs. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, part = row_and_part(BLOCKS)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = tl.load(location + token).to(tl.int64)
    row = at * mult + offset
    key = tl.load(k + token * k_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_stride + column, mask=inside, other=0.0).to(tl.float32)
    if k_scale is not None:
        key *= tl.div_rn(1.0, tl.load(k_scale))
    if v_scale is not None:
        value *= tl.div_rn(1.0, tl.load(v_scale))
    # The location is loaded last: only the stores depend on it.
    written = inside & (at >= 0)
    tl.store(k_out + row * k_out_stride + column, fp8_code(key, True, HARDWARE), mask=written)
    tl.store(v_out + row * v_out_stride + column, fp8_code(value, True, HARDWARE), mask=written)


@triton.jit
def pack_rows(
    first, second, out, scale_inv, number, first_head,
    HEADS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, E4M3: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Elements of a token's heads [FIRST of the head | SECOND of all heads] as float8.

    Args:
        second: None with SECOND = 0.
    """
    head, column = number // (FIRST + SECOND), number % (FIRST + SECOND)
    inside = number < HEADS * (FIRST + SECOND)
    at = first + head * first_head + column
    value = tl.load(at, mask=inside & (column < FIRST), other=0.0).to(tl.float32)
    if SECOND:
        shared = tl.load(second + (column - FIRST), mask=inside & (column >= FIRST), other=0.0)
        value = tl.where(column < FIRST, value, shared.to(tl.float32))
    tl.store(out + number, fp8_code(value * scale_inv, E4M3, HARDWARE), mask=inside)


@triton.jit(early=())
def pack_kernel(
    k_nope, k_pe, v, k_out, v_out, k_scale_inv, v_scale_inv,
    k_token, k_head, pe_token, v_token, v_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, E4M3: tl.constexpr, HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """k_out = the bytes of [k_nope | k_pe] * k_scale_inv, v_out those of v * v_scale_inv. A token
    has BLOCKS programs for each. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, part = row_and_part(2 * BLOCKS)
    number = part % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    if part < BLOCKS:
        pack_rows(
            k_nope + token * k_token, k_pe + token * pe_token,
            k_out + token * HEADS * (NOPE + ROPE), k_scale_inv, number, k_head,
            HEADS, NOPE, ROPE, E4M3, HARDWARE,
        )  # fmt: skip
    else:
        pack_rows(
            v + token * v_token, None, v_out + token * HEADS * VALUE, v_scale_inv, number, v_head,
            HEADS, VALUE, 0, E4M3, HARDWARE,
        )  # fmt: skip


@triton.jit
def clamp_kernel(lengths, out, count, BLOCK: tl.constexpr):
    """out [count] = lengths - 1, at least 0."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    length = tl.load(lengths + i, mask=inside, other=0)
    tl.store(out + i, tl.maximum(length - 1, 0), mask=inside)


@triton.jit
def resolve_kernel(ids, future, count, BLOCK: tl.constexpr):
    """ids [count] < 0 become future[-id]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token = tl.load(ids + i, mask=inside, other=0)
    waiting = inside & (token < 0)
    known = tl.load(future + tl.where(waiting, -token, 0), mask=waiting, other=0)
    tl.store(ids + i, known.to(ids.dtype.element_ty), mask=waiting)


@triton.jit
def zero_rows_kernel(
    out, lse, kv_lens, first, out_stride, lse_stride, width, heads,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Token program_id(0) of request program_id(1): out [width] 0 and lse [heads] -inf, if it has
    no keys."""
    request = tl.program_id(1)
    if tl.load(kv_lens + request) == 0:
        token = tl.load(first + request).to(tl.int64) + tl.program_id(0)
        if token < tl.load(first + request + 1):
            for begin in range(0, width, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                tl.store(out + token * out_stride + column, 0.0, mask=column < width)
            head = tl.arange(0, HEADS)
            tl.store(lse + token * lse_stride + head, float("-inf"), mask=head < heads)


@triton.jit
def hadamard_signs(N: tl.constexpr):
    """[N, N] float32: (-1) ** (number of common 1 bits of row and column), N <= 256."""
    i = tl.arange(0, N)
    both = i[:, None] & i[None, :]
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return (1 - 2 * (both & 1)).to(tl.float32)


@triton.jit
def halves(number, HALF: tl.constexpr):
    """float32 as a sum of two values that a tensor core multiplies by 1 and -1 without loss.

    HALF: in bfloat16, of whose 16 bits half precision needs 11.
    """
    keep: tl.constexpr = -65536 if HALF else -8192
    high = (number.to(tl.int32, bitcast=True) & keep).to(tl.float32, bitcast=True)
    low = tl.where(tl.abs(high) < float("inf"), number - high, 0.0)
    kind: tl.constexpr = tl.bfloat16 if HALF else tl.float32
    return high.to(kind), low.to(kind)


@triton.jit
def halves_by_signs(number, signs, HALF: tl.constexpr):
    """float32 [M, N] times signs [N, N]; HALF: as in `halves`."""
    high, low = halves(number, HALF)
    product = tl.dot(high, signs, input_precision="tf32")
    return tl.dot(low, signs, product, input_precision="tf32")


@triton.jit
def by_signs(number, signs):
    """number [M, N] times signs [N, N]; numbers of half precision are multiplied as they are."""
    if number.dtype == tl.float32:
        product = halves_by_signs(number, signs, False)
    else:
        product = tl.dot(number, signs.to(number.dtype))
    return product


@triton.jit
def signs_by(signs, number):
    """signs [M, M] times number [M, N]; as `by_signs`."""
    if number.dtype == tl.float32:
        high, low = halves(number, False)
        product = tl.dot(signs, high, input_precision="tf32")
        product = tl.dot(signs, low, product, input_precision="tf32")
    else:
        product = tl.dot(signs.to(number.dtype), number)
    return product


@triton.jit
def hadamard_rows_kernel(
    x, out, rows, x_stride, out_stride, width, scale, ROWS: tl.constexpr, N: tl.constexpr
):
    """out[row] = x[row] H_N * scale, ROWS at a time, those shorter than N padded with zeros."""
    signs = hadamard_signs(N)
    column = tl.arange(0, N)[None, :]
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < rows) & (column < width)
        number = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
        result = (by_signs(number, signs) * scale).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + column, result, mask=inside)


@triton.jit
def hadamard_kernel(
    x, out, rows, x_stride, out_stride, width, scale, A: tl.constexpr, B: tl.constexpr
):
    """out[row] = x[row] H_AB * scale, a row at a time, taken as [A, B]: (H_A X) H_B.

    In this order the result of the first product is an operand of the second in registers.
    """
    half: tl.constexpr = x.dtype.element_ty != tl.float32
    place = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    left = hadamard_signs(A)
    right = hadamard_signs(B)
    if half:
        right = right.to(tl.bfloat16)
    inside = place < width
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.zeros([], tl.int64) + row
        number = tl.load(x + at * x_stride + place, mask=inside, other=0.0)
        result = halves_by_signs(signs_by(left, number), right, half) * scale
        tl.store(out + at * out_stride + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def put_integers_kernel(values, out, count, COUNT: tl.constexpr):
    """out[i] = bits 4 .. 35 of values[i], i < count <= COUNT."""
    for i in tl.static_range(COUNT):
        tl.store(out + i, (values[i] >> 4).to(tl.int32), mask=count > i)
