"""Kernels for 4-bit and 8-bit weights in the engine's layout (`cairn.ops.weight_only.layout`)."""

from __future__ import annotations

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.moe.kernels.experts import rows_of
from cairn.ops.pdl import await_previous

UNIT = tl.constexpr(16) if tl is not None else 16
"""Rows of words per block, and elements of a column that one shift extracts from them."""
PTX = gpu.constant(gpu.WRITES_PTX)


def _halves(dtype: str, magic: str, one: str) -> str:
    """PTX that extracts the eight 4-bit codes of each of two words, $8 and $9: $j = code j of both
    words as two 16-bit floats, plus $10. Codes are or'ed into the mantissa of `magic`, a float
    whose last mantissa bit has the value 1 (Kim et al. 2022, https://arxiv.org/abs/2211.10017)."""
    lines = [
        ".reg .b32 lo, hi, t, one;",
        f"mov.b32 one, {one};",
        "prmt.b32 lo, $8, $9, 0x5410;",
        "prmt.b32 hi, $8, $9, 0x7632;",
    ]
    for j in range(8):
        half = "lo" if j < 4 else "hi"
        if j % 4:
            lines.append(f"shr.u32 {half}, {half}, 4;")
        lines.append(f"lop3.b32 t, {half}, 0x000F000F, {magic}, 0xEA;")
        lines.append(f"fma.rn.{dtype}x2 ${j}, t, one, $10;")
    return "{" + " ".join(lines) + "}"


BF16_HALVES = gpu.constant(_halves("bf16", "0x43004300", "0x3F803F80"))
F16_HALVES = gpu.constant(_halves("f16", "0x64006400", "0x3C003C00"))
HALVES_TYPES = gpu.constant(",".join(["=&r"] * 8 + ["r"] * 3))


@triton.jit
def halves_of(words, more):
    """The 8 codes of each word plus `more`, as 8 tensors of more's dtype, bfloat16 or float16."""
    if more.dtype == tl.bfloat16:
        kinds: tl.constexpr = (tl.bfloat16,) * 8
        found = tl.inline_asm_elementwise(
            BF16_HALVES, HALVES_TYPES, [words, more], kinds, is_pure=True, pack=2
        )
    else:
        kinds: tl.constexpr = (tl.float16,) * 8
        found = tl.inline_asm_elementwise(
            F16_HALVES, HALVES_TYPES, [words, more], kinds, is_pure=True, pack=2
        )
    return found


@triton.jit
def codes_of(words, shift, BITS: tl.constexpr, E4M3: tl.constexpr):
    """float32 values of the BITS-bit codes at bit `shift` of each word: integers or, with E4M3,
    e4m3."""
    code = (words >> shift) & ((1 << BITS) - 1)
    if E4M3:
        number = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        number = code.to(tl.float32)
    return number


@triton.jit
def codes_as(words, shift, BITS: tl.constexpr, E4M3: tl.constexpr, dtype: tl.constexpr):
    """`codes_of` in a dtype, plus OFFSET (see `packed_launch.OFFSETS`): in 16 bits an integer is
    or'ed into the mantissa of a float whose last mantissa bit has the value 1, which saves the
    conversion."""
    code = (words >> shift) & ((1 << BITS) - 1)
    if E4M3:
        number = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    elif dtype == tl.float16:
        number = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    elif dtype == tl.bfloat16 and BITS == 4:
        number = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        number = code.to(dtype)
    return number


@triton.jit
def rows_at(own, first, inside, width, EVEN: tl.constexpr):
    """Elements first .. first + 15 of the rows at addresses `own` [BM, 1]."""
    at = tl.arange(0, UNIT) + first
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (at < width)[None, :]
    return tl.load(own + at[None, :], mask=mask, other=0.0)


@triton.jit
def zeros_at(zero, group, number, inside, outputs, MIDDLE: tl.constexpr):
    """Zero points [BN] of a group, float32."""
    if zero is None:
        found = tl.full(number.shape, MIDDLE, tl.float32)
    else:
        stored = tl.load(zero + group * outputs + number, mask=inside, other=0)
        found = stored.to(tl.float32)
    return found


@triton.jit
def packed_sum(
    own, inside, words, scale, zero, number, there, begin, end, width, outputs, groups,
    BITS: tl.constexpr, E4M3: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MIDDLE: tl.constexpr, OFFSET: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products [BM, BN] of rows at addresses `own` [BM, 1] with columns `number` of the weight in
    blocks of words begin .. end - 1; see `linear_packed_kernel`."""
    COUNT: tl.constexpr = 32 // BITS
    BLOCK: tl.constexpr = 16 * COUNT
    dtype: tl.constexpr = own.dtype.element_ty
    line = tl.arange(0, UNIT)
    total = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        row = (line + block * UNIT).to(tl.int64)
        at = words + row[:, None] * outputs + number[None, :]
        packed = tl.load(at, mask=there[None, :], other=0)
        if GROUP == 0 or GROUP % BLOCK == 0:
            group = block * BLOCK // GROUP if GROUP > 0 else 0
            middle = zeros_at(zero, group, number, there, outputs, MIDDLE)
            middle = (middle + OFFSET).to(dtype)
            factor = tl.load(scale + group * outputs + number, mask=there, other=0.0)
            part = tl.zeros((BM, BN), tl.float32)
            if PTX and BITS == 4 and dtype != tl.float32:
                values = halves_of(packed, -middle[None, :])
                for j in tl.static_range(COUNT):
                    left = rows_at(own, block * BLOCK + j * UNIT, inside, width, EVEN)
                    part = tl.dot(left, values[j], part)
            else:
                for j in tl.static_range(COUNT):
                    left = rows_at(own, block * BLOCK + j * UNIT, inside, width, EVEN)
                    right = codes_as(packed, j * BITS, BITS, E4M3, dtype) - middle[None, :]
                    part = tl.dot(left, right, part, input_precision=PRECISION)
            total += part * factor[None, :]
        else:
            for j in tl.static_range(COUNT):
                first = block * BLOCK + j * UNIT
                group = tl.minimum(first // GROUP, groups - 1)
                middle = zeros_at(zero, group, number, there, outputs, MIDDLE)
                middle = (middle + OFFSET).to(dtype)
                left = rows_at(own, first, inside, width, EVEN)
                right = codes_as(packed, j * BITS, BITS, E4M3, dtype) - middle[None, :]
                factor = tl.load(scale + group * outputs + number, mask=there, other=0.0)
                total += tl.dot(left, right, input_precision=PRECISION) * factor[None, :]
    return total


@triton.jit(early=(), do_not_specialize=["tokens", "split", "blocks"])
def linear_packed_kernel(
    x, words, scale, zero, out, tokens, width, outputs, groups, x_stride, out_stride, split, blocks,
    BITS: tl.constexpr, E4M3: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MIDDLE: tl.constexpr, OFFSET: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, width] times the weight, or, with several programs along
    the second axis of the grid (split-K), each program's sum over its `split` blocks: out [parts,
    tokens, outputs].

    Args:
        words: [16 * blocks, outputs]; scale, zero: [groups, outputs], zero None: MIDDLE.
        E4M3: codes are e4m3 values, not integers.
        GROUP: group size, a multiple of 16; 0: there is one group.
        OFFSET: value that `codes_as` adds to codes for x's dtype.
        EVEN: width is a multiple of the block size.
        STAGES: pipeline stages of the loop over blocks.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    number = tl.program_id(0) * BN + tl.arange(0, BN)
    there = number < outputs
    token = tl.arange(0, BM)
    inside = token < tokens
    own = x + token.to(tl.int64)[:, None] * x_stride
    begin = tl.program_id(1) * split
    total = packed_sum(
        own, inside, words, scale, zero, number, there, begin, tl.minimum(begin + split, blocks),
        width, outputs, groups, BITS, E4M3, GROUP, BM, BN, MIDDLE, OFFSET, PRECISION, EVEN,
        STAGES,
    )  # fmt: skip
    place = (tl.program_id(1).to(tl.int64) * tokens + token)[:, None] * out_stride + number[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit(early=(), do_not_specialize=["pairs", "count"])
def experts_packed_kernel(
    x, words, scale, zero, out, order, owners, used, pairs, share, count, width, outputs, groups,
    x_stride, blocks,
    BITS: tl.constexpr, E4M3: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MIDDLE: tl.constexpr, OFFSET: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, outputs]: row pair // share of x times the matrix of the pair's expert.

    Tiles of pairs are those of `cairn.ops.moe.experts_launch.Rows`: tile t has the expert
    owners[t]. If that is negative the tile is skipped; with SINGLE its row of out is set to 0.

    Args:
        words: [E, 16 * blocks, outputs]; scale, zero: [E, groups, outputs].
        order, used, count, SINGLE: see `cairn.ops.moe.kernels.experts.rows_of`.
        share: pairs per row of x.
        others: as in `linear_packed_kernel`.
    """
    await_previous(PDL)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    if used is not None:
        tiles = tl.load(used) // BM
    if tile >= tiles:
        return
    number = tl.program_id(0) * BN + tl.arange(0, BN)
    there = number < outputs
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        if SINGLE:
            nothing = tl.zeros((BN,), out.dtype.element_ty)
            tl.store(out + tile.to(tl.int64) * outputs + number, nothing, mask=there)
        return
    source, target, inside = rows_of(
        tile, order, None, None, pairs, share, count, BM, True, True, SINGLE
    )
    words += expert * blocks * UNIT * outputs
    scale += expert * groups * outputs
    if zero is not None:
        zero += expert * groups * outputs
    total = packed_sum(
        x + source[:, None] * x_stride, inside, words, scale, zero, number, there, 0, blocks,
        width, outputs, groups, BITS, E4M3, GROUP, BM, BN, MIDDLE, OFFSET, PRECISION, EVEN,
        STAGES,
    )  # fmt: skip
    to = out + target[:, None] * outputs + number[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit(early=(), do_not_specialize=["count"])
def sum_parts_kernel(
    parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out [count] = the sum of parts [PARTS, count], in order."""
    await_previous(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_packed_kernel(
    words, scale, zero, out, rows, outputs, width, groups, group,
    BITS: tl.constexpr, E4M3: tl.constexpr, BN: tl.constexpr, MIDDLE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """out [E, outputs, width] of words [E, rows, outputs], 16 rows of words and BN columns per
    program. WHOLE: each program's elements are in one group."""
    COUNT: tl.constexpr = 32 // BITS
    BLOCK: tl.constexpr = 16 * COUNT
    expert = tl.program_id(2).to(tl.int64)
    words += expert * rows * outputs
    scale += expert * groups * outputs
    out += expert * outputs * width
    number = tl.program_id(0) * BN + tl.arange(0, BN)
    there = number < outputs
    row = (tl.program_id(1) * UNIT + tl.arange(0, UNIT)).to(tl.int64)
    packed = tl.load(words + row[:, None] * outputs + number[None, :], mask=there[None, :], other=0)
    # [codes per word, rows of words, columns], joined to [BLOCK, columns] below
    shift = (tl.arange(0, COUNT) * BITS)[:, None, None]
    code = codes_of(packed[None, :, :], shift, BITS, E4M3).reshape(BLOCK, BN)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < width)[:, None] & there[None, :]
    if WHOLE:
        place = (tl.program_id(1) * BLOCK // group * outputs + number)[None, :]
        read = there[None, :]
    else:
        place = tl.minimum(at // group, groups - 1)[:, None] * outputs + number[None, :]
        read = inside
    factor = tl.load(scale + place, mask=read, other=0.0)
    if zero is None:
        value = code - MIDDLE
    else:
        middle = tl.load(zero + expert * groups * outputs + place, mask=read, other=0)
        value = code - middle.to(tl.float32)
    to = out + number.to(tl.int64)[None, :] * width + at[:, None]
    tl.store(to, (value * factor).to(out.dtype.element_ty), mask=inside)
