"""Kernels that quantize to 8 and 4 bits."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous


@triton.jit
def fp8_by_integers(x, E4M3: tl.constexpr):
    """float32 as the byte of float8 e4m3 or e5m2, in int32: clamped to the largest value, to the
    nearest, ties to even; NaN stays. For devices without the conversion."""
    DROPPED: tl.constexpr = 20 if E4M3 else 21
    LARGEST: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000
    MIN_NORMAL: tl.constexpr = 0x3C800000 if E4M3 else 0x38800000
    # The difference of the exponents' biases.
    BIAS: tl.constexpr = (120 << 3) if E4M3 else (112 << 2)
    # Added to it, a number below the least normal one is rounded to the step of subnormal ones.
    ANCHOR: tl.constexpr = 16384.0 if E4M3 else 128.0
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    cut = tl.minimum(bits, LARGEST)
    half: tl.constexpr = (1 << (DROPPED - 1)) - 1
    normal = ((cut + half + ((cut >> DROPPED) & 1)) >> DROPPED) - BIAS
    small = (cut.to(tl.float32, bitcast=True) + ANCHOR).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(cut < MIN_NORMAL, small, normal)
    return sign | tl.where(bits > 0x7F800000, 0x7F, byte)


@triton.jit
def code_of(
    number, low, high, ROUNDING: tl.constexpr, CLAMPED: tl.constexpr, HARDWARE: tl.constexpr
):
    """float32 as a byte.

    Args:
        ROUNDING: "e4m3"; or of int8 "nearest", for values that need no clamp (NaN becomes -1), or
            "truncate" (NaN becomes 0).
        CLAMPED: to low .. high first. The hardware's e4m3 needs no clamp to -448 .. 448.
        HARDWARE: the device knows e4m3.
    """
    if ROUNDING == "nearest":
        # 1.5 * 2^23: the last bit of the sum is worth 1, so its last byte is the rounded integer.
        return ((number + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
    if CLAMPED:
        number = tl.where(number < low, low, number)
        number = tl.where(number > high, high, number)
    if ROUNDING == "e4m3":
        if HARDWARE:
            return number.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return fp8_by_integers(number, True).to(tl.uint8)
    return (tl.where(number == number, number, 0.0).to(tl.int32) & 0xFF).to(tl.uint8)


@triton.jit
def largest_bits(number, AXIS: tl.constexpr):
    """Bits of the largest magnitude; NaN counts as the largest."""
    return tl.max(number.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def inverse_of(scale):
    """1 / scale, finite; 0 for 0."""
    inverse = tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
    inverse = tl.where(inverse > 3.4028234663852886e38, 3.4028234663852886e38, inverse)
    return tl.where(scale == 0.0, 0.0, inverse)


@triton.jit
def amax_bits(x, count, BLOCK: tl.constexpr):
    """Bits of the largest magnitude of a program's blocks of x, every programs-th."""
    found = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        at = begin + tl.arange(0, BLOCK)
        number = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
        found = tl.maximum(found, number.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        begin += step
    return tl.max(found, 0)


@triton.jit(early=())
def amax_kernel(x, parts, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """parts[program] = bits of the largest magnitude of its blocks of x. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    tl.store(parts + tl.program_id(0), amax_bits(x, count, BLOCK))


@triton.jit(early=())
def tensor_kernel(
    x, q, scale, parts, count, number_of_parts, high,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of x, quantized with the scale of the whole tensor; with parts, the scale is computed
    from them and stored. PDL: as in `await_previous`."""
    await_previous(PDL)
    if parts is None:
        own = tl.load(scale)
    else:
        part = tl.arange(0, PARTS)
        bits = tl.max(tl.load(parts + part, mask=part < number_of_parts, other=0), 0)
        own = tl.div_rn(bits.to(tl.float32, bitcast=True), high)
        if tl.program_id(0) == 0:
            tl.store(scale, own)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    code = code_of(number * inverse_of(own), -high, high, "e4m3", not HARDWARE, HARDWARE)
    tl.store(q + at, code, mask=at < count)


@triton.jit
def gated(gate, up):
    """silu(gate) * up, rounded to their dtype after each step."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def power_of_two(scale):
    """A scale rounded up to a power of two: its exponent, with a bias of 127, and its value; 255
    and NaN if the scale is not finite."""
    # NaN as infinity: the sum must not overflow.
    exponent = (tl.minimum(scale.to(tl.int32, bitcast=True), 0x7F800000) + 0x7FFFFF) >> 23
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    power = bits.to(tl.float32, bitcast=True)
    return exponent, tl.where(exponent == 255, float("nan"), power)


@triton.jit(early=())
def groups_kernel(
    x, q, scale, masked_m, total, tiles, per_row, rows, width,
    x_expert, x_row, s_expert, s_row, s_group, eps, low, high,
    T: tl.constexpr, TILE: tl.constexpr, WP: tl.constexpr, ROUNDING: tl.constexpr,
    INVERSE: tl.constexpr, CLAMPED: tl.constexpr, GATED: tl.constexpr, POWER: tl.constexpr,
    PACKED: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """T groups of `width` elements, each with its own scale: TILE groups of each of T / TILE rows.

    Of `total` rows [per_row, width] row r is row r % rows of expert r // rows, or r without `rows`;
    with masked_m only the first masked_m[expert] rows of an expert are in use. `tiles`: tiles per
    row, enough for the stored scales: per_row of these or, when four exponents share a word
    (PACKED), a multiple of 4. PDL: as in `await_previous`.
    """
    await_previous(PDL)
    program, place = tl.program_id(0), tl.arange(0, T)
    row = program // tiles * (T // TILE) + place // TILE
    group = program % tiles * TILE + place % TILE
    alive = row < total
    if rows is None:
        expert, inner = tl.zeros_like(row), row
    else:
        expert, inner = row // rows, row % rows
    if masked_m is not None:
        alive = alive & (inner < tl.load(masked_m + expert, mask=alive, other=0))
    row, expert, inner = row.to(tl.int64), expert.to(tl.int64), inner.to(tl.int64)
    real = alive & (group < per_row)
    lane = tl.arange(0, WP)
    inside = real[:, None] & (lane < width)[None, :]
    at = (expert * x_expert + inner * x_row + group * width)[:, None] + lane[None, :]
    number = tl.load(x + at, mask=inside, other=0.0)
    if GATED:
        up = tl.load(x + at + per_row * width, mask=inside, other=0.0)
        number = gated(number, up)
    number = number.to(tl.float32)
    bits = largest_bits(number, 1)
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < eps, eps, largest)
    own = tl.div_rn(largest, high)
    if POWER:
        exponent, own = power_of_two(own)
    if INVERSE:
        scaled = number * inverse_of(own)[:, None]
    else:
        scaled = tl.div_rn(number, tl.where(own == 0.0, 1.0, own)[:, None])
        scaled = tl.where((own == 0.0)[:, None], 0.0, scaled)
    to = q + ((row * per_row + group) * width)[:, None] + lane[None, :]
    code = code_of(scaled, low, high, ROUNDING, CLAMPED, HARDWARE)
    if ROUNDING == "nearest":
        # The products are NaN and 0 in a group with NaN or infinity, and all codes 0.
        finite = (bits < 0x7F800000)[:, None]
        tl.store(to, tl.zeros_like(code), mask=inside & (finite == 0))
        inside = inside & finite
    tl.store(to, code, mask=inside)
    if PACKED:
        # Four exponents share a word; bytes after the last group are 0.
        word = expert * s_expert + inner * s_row + (group // 4) * s_group
        byte = tl.where(real, exponent, 0).to(tl.uint8)
        tl.store(scale.to(tl.pointer_type(tl.uint8)) + word * 4 + group % 4, byte, mask=alive)
    else:
        tl.store(scale + expert * s_expert + inner * s_row + group * s_group, own, mask=real)


@triton.jit
def e4m3_rounded(size):
    """Magnitudes, NaN among them, to the nearest of e4m3, ties to even, at most 448: as float32
    and as its codes in int32."""
    size = tl.where(size > 448.0, 448.0, size)
    # Adding 2 ** 20 times a number's power of two rounds it to 3 mantissa bits. Subnormals, below
    # 2 ** -6, all have steps of 2 ** -9.
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000) + (20 << 23)
    power = tl.maximum(power, (127 + 14) << 23)
    whole = power.to(tl.float32, bitcast=True)
    raised = size + whole
    code = raised.to(tl.int32, bitcast=True) - power + (power >> 20) - ((127 + 14) << 3)
    return raised - whole, tl.where(size == size, code, 0x7F)


@triton.jit
def e2m1_words(number, factor, place):
    """float32 times factors as e2m1 codes, moved up by `place` bits and added along the last axis.

    Over the magnitudes the codes lie on three lines, 2 x, x + 2 and x / 2 + 4, of which the lowest
    counts. A sum with 2 ** 23 is rounded to an integer, ties to even, which its last bits show.
    """
    # The abs() keeps the compiler from fusing the product into the sum below: it must be rounded
    # first.
    size = tl.abs(number * factor)
    low = tl.fma(size, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    middle = (size + 8388610.0).to(tl.int32, bitcast=True)
    high = tl.fma(size, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    # As integers they are in the same order, and NaN is the largest. The last code is 7.
    code = tl.minimum(tl.minimum(low, middle), tl.minimum(high, 0x4B000007)) - 0x4B000000
    sign = (number.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.sum(code << place, 2) + tl.sum(sign << place, 2)


@triton.jit
def nvfp4_blocks(x, block, inside, width, global_scale, T: tl.constexpr, GATED: tl.constexpr):
    """Codes, eight to a word [T, 2] int32, and scales [T], as bytes, of blocks of a row; 0 where
    not inside.

    Args:
        x: the row; GATED: gates, and `width` elements after each gate its up projection.
        global_scale: one float32.
    """
    # A thread loads 16 bytes at once, which lie within one block.
    wide: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    parts: tl.constexpr = 16 // wide
    lane = tl.arange(0, parts)[None, :, None] * wide + tl.arange(0, wide)[None, None, :]
    at = x + block.to(tl.int64)[:, None, None] * 16 + lane
    number = tl.load(at, mask=inside[:, None, None], other=0.0)
    if GATED:
        up = tl.load(at + width, mask=inside[:, None, None], other=0.0)
        gate = number.to(tl.float32)
        number = (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(number.dtype)
    number = number.to(tl.float32)
    largest = tl.max(largest_bits(number, 2), 1).to(tl.float32, bitcast=True)
    # A block's scale has the sign of the global one, so their quotient is positive.
    scale, code = e4m3_rounded(tl.abs(global_scale) * (largest * 0.16666666666666666))
    factor = inverse_of(scale * tl.abs(inverse_of(global_scale)))
    words = e2m1_words(number, factor[:, None, None], lane % 8 * 4)
    words = tl.sum(tl.reshape(words, T, 2, parts // 2), 2)
    code |= (global_scale.to(tl.int32, bitcast=True) >> 24) & 0x80
    return words, tl.where(inside, code, 0).to(tl.uint8)


@triton.jit
def nvfp4_scale_at(row, block, tiles):
    """Where a scale is stored: see `cairn.ops.quantization.nvfp4`."""
    tile = row // 128 * tiles + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@triton.jit
def nvfp4_rows_kernel(
    x, codes, scales, global_scale, mask, rows, blocks, tiles, x_group, x_row,
    T: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """T blocks of a row of a group, the rows that pad the scales among them.

    With a mask only the first mask[group] rows of a group are in use. tiles: tiles of scales per
    row.
    """
    row = tl.program_id(0)
    if mask is not None:
        # Rows of the first and the last half alternate: rows in use are the first ones, so reading
        # them overlaps with writing the zeros of the others.
        row = row // 2 + row % 2 * (tl.num_programs(0) // 2)
    row, group = row.to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.program_id(1) * T + tl.arange(0, T)
    inside = block < blocks
    used = row < rows
    if mask is not None:
        used = used & (row < tl.load(mask + group))
    words = tl.zeros((T, 2), tl.int32)
    scale = tl.zeros((T,), tl.uint8)
    if used:
        own = tl.load(global_scale + group)
        start = x + group * x_group + row * x_row
        words, scale = nvfp4_blocks(start, block, inside, blocks * 16, own, T, GATED)
    to = ((group * rows + row) * blocks + block) * 2
    there = inside & (row < rows)
    tl.store(codes + to[:, None] + tl.arange(0, 2)[None, :], words, mask=there[:, None])
    first = group * tl.num_programs(0) * tiles * 4
    tl.store(scales + first + nvfp4_scale_at(row, block, tiles), scale, mask=block < tiles * 4)


@triton.jit
def nvfp4_experts_kernel(
    x, codes, scales, global_scale, offsets, starts, order, rows, blocks, tiles, experts, x_row,
    T: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """T blocks of a row, of rows sorted by expert; and zeros for the row of scales with the same
    index, if it belongs to no expert (there are more rows of scales than rows).

    Row r is row `order[r]` of x, if there is an order.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * T + tl.arange(0, T)
    inside = block < blocks
    stored = block < tiles * 4
    each = tl.arange(0, EP)
    begin = tl.load(offsets + each, mask=each < experts, other=0)
    end = tl.minimum(tl.load(offsets + each + 1, mask=each < experts, other=0), rows)
    start = tl.load(starts + each, mask=each < experts, other=0)
    owner = tl.max(tl.where((begin <= row) & (row < end), each, -1), 0)
    words = tl.zeros((T, 2), tl.int32)
    if owner >= 0:
        source = row
        if order is not None:
            source = tl.load(order + row).to(tl.int64)
        own = tl.load(global_scale + owner)
        words, scale = nvfp4_blocks(x + source * x_row, block, inside, 0, own, T, False)
        place = row + tl.load(starts + owner) - tl.load(offsets + owner)
        tl.store(scales + nvfp4_scale_at(place, block, tiles), scale, mask=stored)
    to = (row * blocks + block) * 2
    there = inside & (row < rows)
    tl.store(codes + to[:, None] + tl.arange(0, 2)[None, :], words, mask=there[:, None])
    taken = tl.max(((start <= row) & (row - start < end - begin)).to(tl.int32), 0)
    if taken == 0:
        nothing = tl.zeros((T,), tl.uint8)
        tl.store(scales + nvfp4_scale_at(row, block, tiles), nothing, mask=stored)


@triton.jit
def global_scale_kernel(x, scale, count, BLOCK: tl.constexpr):
    """scale = 448 * 6 / max |x|, or 1 if that is 0, by one program."""
    largest = amax_bits(x, count, BLOCK).to(tl.float32, bitcast=True)
    found = tl.div_rn(1.0, tl.where(largest == 0.0, 1.0, largest)) * 2688.0
    tl.store(scale, tl.where(largest == 0.0, 1.0, found))
