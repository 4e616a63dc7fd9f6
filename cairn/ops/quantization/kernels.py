"""Kernels that turn numbers into codes of 8 bits."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def e4m3_code(number):
    """float32 within -448 .. 448 as the bytes of e4m3, in int32: to the nearest, ties to even.

    By hand, for not every device that runs these kernels knows e4m3.
    """
    bits = number.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # To the nearest of 3 bits behind the first, ties to even; the exponent's bias is 7, not 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 steps are 2 ** -9: those of a float32 from 2 ** 14 on, whose last bits count.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return sign | tl.where(bits < 0x3C800000, small, normal)


@triton.jit
def code_of(number, low, high, ROUNDING: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 clamped to low .. high as a byte.

    Args:
        ROUNDING: "e4m3"; or of int8 "nearest", "truncate" (NaN is then 0).
        HARDWARE: the device knows e4m3.
    """
    number = tl.where(number < low, low, number)
    number = tl.where(number > high, high, number)
    if ROUNDING == "e4m3":
        if HARDWARE:
            return number.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(number == number, e4m3_code(number), 0x7F).to(tl.uint8)
    number = tl.where(number == number, number, 0.0)
    if ROUNDING == "nearest":
        # So large that the last bit of the sum is worth 1.
        number = (number + 12582912.0) - 12582912.0
    return (number.to(tl.int32) & 0xFF).to(tl.uint8)


@triton.jit
def largest_bits(number, AXIS: tl.constexpr):
    """Bits of the largest magnitude: NaN is larger than any number."""
    return tl.max(number.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def inverse_of(scale):
    """1 / scale, finite; 0 for 0."""
    inverse = tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
    inverse = tl.where(inverse > 3.4028234663852886e38, 3.4028234663852886e38, inverse)
    return tl.where(scale == 0.0, 0.0, inverse)


@triton.jit
def amax_kernel(x, parts, count, BLOCK: tl.constexpr):
    """parts[program] = bits of the largest magnitude of every programs-th block of x."""
    found = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        at = begin + tl.arange(0, BLOCK)
        number = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
        found = tl.maximum(found, number.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        begin += step
    tl.store(parts + tl.program_id(0), tl.max(found, 0))


@triton.jit
def tensor_kernel(
    x, q, scale, parts, count, number_of_parts, high,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A block of x by the scale of the whole; with parts, that comes from them and is stored."""
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
    code = code_of(number * inverse_of(own), -high, high, "e4m3", HARDWARE)
    tl.store(q + at, code, mask=at < count)


@triton.jit
def gated(gate, up):
    """silu(gate) * up, rounded to their dtype after each step."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def power_of_two(scale):
    """The exponent, with a bias of 127, of the least power of two that is not below a scale, and
    that power; 255 and NaN for what is not finite."""
    exponent = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 255
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    power = bits.to(tl.float32, bitcast=True)
    return exponent, tl.where(exponent == 255, float("nan"), power)


@triton.jit
def groups_kernel(
    x, q, scale, masked_m, total, per_row, columns, rows, width,
    x_expert, x_row, s_expert, s_row, s_group, eps, low, high,
    T: tl.constexpr, WP: tl.constexpr, ROUNDING: tl.constexpr, INVERSE: tl.constexpr,
    GATED: tl.constexpr, POWER: tl.constexpr, PACKED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """T groups of `width` numbers, each by its own scale.

    A row [per_row, width] is row r % rows of expert r // rows; with masked_m only so many rows of
    an expert are there. `columns`: scales that are stored of every row, per_row or, when four
    exponents share a word (PACKED), a multiple of 4.
    """
    line = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    row, group = line // columns, line % columns
    expert, inner = row // rows, row % rows
    alive = line < total
    if masked_m is not None:
        alive = alive & (inner < tl.load(masked_m + expert, mask=alive, other=0))
    real = alive & (group < per_row)
    lane = tl.arange(0, WP)
    inside = real[:, None] & (lane < width)[None, :]
    at = (expert * x_expert + inner * x_row + group * width)[:, None] + lane[None, :]
    number = tl.load(x + at, mask=inside, other=0.0)
    if GATED:
        up = tl.load(x + at + per_row * width, mask=inside, other=0.0)
        number = gated(number, up)
    number = number.to(tl.float32)
    largest = largest_bits(number, 1).to(tl.float32, bitcast=True)
    largest = tl.where(largest < eps, eps, largest)
    own = tl.div_rn(largest, high)
    if POWER:
        exponent, own = power_of_two(own)
    if INVERSE:
        scaled = number * inverse_of(own)[:, None]
    else:
        scaled = tl.div_rn(number, tl.where(own == 0.0, 1.0, own)[:, None])
        scaled = tl.where((own == 0.0)[:, None], 0.0, scaled)
    to = ((row * per_row + group) * width)[:, None] + lane[None, :]
    tl.store(q + to, code_of(scaled, low, high, ROUNDING, HARDWARE), mask=inside)
    if PACKED:
        # The byte of the word; of a place behind the last group, 0.
        word = expert * s_expert + inner * s_row + (group // 4) * s_group
        byte = tl.where(real, exponent, 0).to(tl.uint8)
        tl.store(scale.to(tl.pointer_type(tl.uint8)) + word * 4 + group % 4, byte, mask=alive)
    else:
        tl.store(scale + expert * s_expert + inner * s_row + group * s_group, own, mask=real)
