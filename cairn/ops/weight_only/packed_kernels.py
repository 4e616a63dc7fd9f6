"""Kernels of weights of 4 and 8 bits in the engine's layout (`cairn.ops.weight_only.layout`)."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous

UNIT = tl.constexpr(16) if tl is not None else 16
"""Rows of words, and numbers of a column that one shift takes out of them."""


@triton.jit
def codes_of(words, shift, BITS: tl.constexpr):
    """The codes of BITS bits from a bit on, as float32."""
    return ((words >> shift) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def codes_as(words, shift, BITS: tl.constexpr, dtype: tl.constexpr):
    """The codes of BITS bits from a bit on, plus OFFSET: in 16 bits they
    are put below the exponent of a number whose last bit is worth 1, which takes no conversion."""
    code = (words >> shift) & ((1 << BITS) - 1)
    if dtype == tl.float16:
        number = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    elif dtype == tl.bfloat16 and BITS == 4:
        number = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        number = code.to(dtype)
    return number


@triton.jit
def rows_at(own, first, inside, width):
    """Numbers first .. first + 15 of rows whose addresses are `own` [BM, 1]."""
    at = tl.arange(0, UNIT) + first
    return tl.load(own + at[None, :], mask=inside[:, None] & (at < width)[None, :], other=0.0)


@triton.jit
def zeros_at(zero, group, number, groups, inside, zero_stride, BITS: tl.constexpr):
    """Zero points [BN] of a group, float32."""
    if zero is None:
        found = tl.full(number.shape, 1 << (BITS - 1), tl.float32)
    else:
        stored = tl.load(zero + group * zero_stride + number, mask=inside, other=0)
        found = stored.to(tl.float32)
    return found


@triton.jit(early=(), do_not_specialize=["tokens"])
def linear_packed_kernel(
    x, words, scale, zero, out, tokens, width, numbers, groups, x_stride, out_stride, split,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    OFFSET: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, numbers] = x [tokens, width] times the weight, or with several programs along
    the second axis of the grid the part of each over its `split` blocks: out [parts, tokens,
    numbers].

    Args:
        words: [W, numbers]; scale, zero: [groups, numbers], zero None: 2^(BITS - 1).
        GROUP: numbers of a group, a multiple of 16; 0: there is one group.
        OFFSET: what `codes_as` adds to codes for x's dtype.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    COUNT: tl.constexpr = 32 // BITS
    BLOCK: tl.constexpr = 16 * COUNT
    dtype: tl.constexpr = x.dtype.element_ty
    number = tl.program_id(0) * BN + tl.arange(0, BN)
    there = number < numbers
    token = tl.arange(0, BM)
    inside = token < tokens
    line = tl.arange(0, UNIT)
    own = x + token.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BM, BN), tl.float32)
    begin = tl.program_id(1) * split
    end = tl.minimum(begin + split, (width + BLOCK - 1) // BLOCK)
    for block in range(begin, end):
        row = (line + block * UNIT).to(tl.int64)
        at = words + row[:, None] * numbers + number[None, :]
        packed = tl.load(at, mask=there[None, :], other=0)
        if GROUP == 0 or GROUP % BLOCK == 0:
            group = block * BLOCK // GROUP if GROUP > 0 else 0
            middle = zeros_at(zero, group, number, groups, there, numbers, BITS)
            middle = (middle + OFFSET).to(dtype)
            part = tl.zeros((BM, BN), tl.float32)
            for j in tl.static_range(COUNT):
                left = rows_at(own, block * BLOCK + j * UNIT, inside, width)
                right = codes_as(packed, j * BITS, BITS, dtype) - middle[None, :]
                part = tl.dot(left, right, part, input_precision=PRECISION)
            factor = tl.load(scale + group * numbers + number, mask=there, other=0.0)
            total += part * factor[None, :]
        else:
            for j in tl.static_range(COUNT):
                first = block * BLOCK + j * UNIT
                group = tl.minimum(first // GROUP, groups - 1)
                middle = zeros_at(zero, group, number, groups, there, numbers, BITS)
                middle = (middle + OFFSET).to(dtype)
                left = rows_at(own, first, inside, width)
                right = codes_as(packed, j * BITS, BITS, dtype) - middle[None, :]
                factor = tl.load(scale + group * numbers + number, mask=there, other=0.0)
                total += tl.dot(left, right, input_precision=PRECISION) * factor[None, :]
    place = (tl.program_id(1).to(tl.int64) * tokens + token)[:, None] * out_stride + number[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit(early=(), do_not_specialize=["count"])
def sum_parts_kernel(
    parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out [count] = the sum of parts [PARTS, count], in their order."""
    await_previous(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_packed_kernel(
    words, scale, zero, out, rows, numbers, width, groups, group,
    BITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [E, numbers, width] of words [E, rows, numbers], 16 rows of words and BN columns a
    program."""
    COUNT: tl.constexpr = 32 // BITS
    expert = tl.program_id(2).to(tl.int64)
    words += expert * rows * numbers
    scale += expert * groups * numbers
    out += expert * numbers * width
    number = tl.program_id(0) * BN + tl.arange(0, BN)
    there = number < numbers
    line = tl.arange(0, UNIT)
    row = (tl.program_id(1) * UNIT + line).to(tl.int64)
    packed = tl.load(words + row[:, None] * numbers + number[None, :], mask=there[None, :], other=0)
    for j in tl.static_range(COUNT):
        at = (tl.program_id(1) * COUNT + j) * UNIT + line
        place = tl.minimum(at // group, groups - 1)[:, None] * numbers + number[None, :]
        inside = (at < width)[:, None] & there[None, :]
        factor = tl.load(scale + place, mask=inside, other=0.0)
        code = codes_of(packed, j * BITS, BITS)
        if zero is None:
            value = code - (1 << (BITS - 1))
        else:
            middle = tl.load(zero + expert * groups * numbers + place, mask=inside, other=0)
            value = code - middle.to(tl.float32)
        to = out + number.to(tl.int64)[None, :] * width + at[:, None]
        tl.store(to, (value * factor).to(out.dtype.element_ty), mask=inside)
