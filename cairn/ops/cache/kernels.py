"""Kernel of the cache write, and how kernels read a quantized cache."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous
from cairn.ops.quantization.kernels import fp8_by_integers


@triton.jit
def quantized(x):
    """The rows of x [M, N] as bytes, see `cairn.ops.cache.quantized`: numbers and exponents [M].

    Reading is by hand, as rounding is: not every device that runs these kernels knows e4m3.
    """
    number = x.to(tl.float32)
    bits = tl.max(number.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    exponent = tl.where(finite, exponent, 255)
    byte = fp8_by_integers(number * inverse[:, None], True)
    return tl.where(finite[:, None], byte, 0).to(tl.uint8), exponent.to(tl.uint8)


@triton.jit
def scales(head, line, inner, alive, DIM: tl.constexpr, SIZE: tl.constexpr):
    """[N] float32: the scales of the slots `inner` of pages whose numbers are at head + line."""
    exponent = tl.load(head + line + (SIZE * DIM + inner * (1 - DIM)), mask=alive, other=0)
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def worth(byte, scale, DTYPE: tl.constexpr):
    """What the bytes are worth by their scales, as DTYPE."""
    bits = ((byte.to(tl.int32) & 0x80) << 24) | ((byte.to(tl.int32) & 0x7F) << 20)
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return (number * scale).to(DTYPE)


@triton.jit
def write_kv_kernel(
    k, v, k_cache, v_cache, location,
    k_stride, v_stride, page_stride, head_stride,
    SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PARTS: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store HP key and value heads of one token, which has PARTS programs, in its slot; a negative
    location is not written."""
    token, part = row_and_part(PARTS)
    head = part * HP + tl.arange(0, HP)
    d = tl.arange(0, DP)
    inside = (head < HEADS)[:, None] & (d < DIM)[None, :]
    read = head[:, None] * DIM + d[None, :]
    # Only what is written waits for the place.
    key = tl.load(k + token * k_stride + read, mask=inside, other=0.0)
    value = tl.load(v + token * v_stride + read, mask=inside, other=0.0)
    at = tl.load(location + token)
    inside = inside & (at >= 0)
    block = (at // SIZE) * page_stride + head.to(tl.int64) * head_stride
    write = block[:, None] + (at % SIZE) * DIM + d[None, :]
    if k_cache.dtype.element_ty == tl.uint8:
        behind = block + SIZE * DIM + at % SIZE
        key, key_exponent = quantized(key)
        value, value_exponent = quantized(value)
        written = (head < HEADS) & (at >= 0)
        tl.store(k_cache + behind, key_exponent, mask=written)
        tl.store(v_cache + behind, value_exponent, mask=written)
    tl.store(k_cache + write, key, mask=inside)
    tl.store(v_cache + write, value, mask=inside)


@triton.jit
def _put_slots(at, most, token, position, row, slot, location, own, mask):
    """Store what is known of slots, a line each."""
    tl.store(at, token, mask=mask)
    tl.store(at + most, position, mask=mask)
    tl.store(at + 2 * most, row, mask=mask)
    tl.store(at + 3 * most, slot, mask=mask)
    tl.store(at + 4 * most, location, mask=mask)
    tl.store(at + 7 * most, own, mask=mask)


@triton.jit(early=())
def decode_slots_kernel(
    row_ptr,
    first_ptr,
    cells_ptr,
    pages_ptr,
    last_token_ptr,
    tables_ptr,
    given_ptr,
    out_ptr,
    num_rows,
    most,
    width,
    spare,
    window_spare,
    landmark_id,
    SIZE: tl.constexpr,
    PER_PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: each of its numbers is a cell of the tables, a row, then a slot of padding.
    PDL: as in `await_previous`; the next kernel is not launched before this one is done."""
    await_previous(PDL, False)
    i = tl.arange(0, BLOCK)
    inside = i < most
    cell = tl.load(cells_ptr + i, mask=inside, other=0)
    tl.store(tables_ptr + cell, tl.load(pages_ptr + i, mask=inside, other=0), mask=inside)
    # What all threads stored, all can load.
    tl.debug_barrier()
    row = tl.load(row_ptr + i, mask=inside, other=0)
    live = inside & (row < num_rows)
    row = tl.where(live, row, 0)
    first = tl.load(first_ptr + i, mask=live, other=0)
    token = tl.maximum(tl.load(last_token_ptr + row, mask=live, other=0), 0)
    if given_ptr is not None:
        given = tl.load(given_ptr + i, mask=live, other=-1)
        token = tl.where(given == -1, token, tl.maximum(given, -2 - given))
    slot = first
    if PER_PAGE < SIZE:
        slot = first + first // PER_PAGE
    logical = slot // SIZE
    place = slot - logical * SIZE
    fills = live & (place == PER_PAGE - 1)
    count = live.to(tl.int32)
    if PER_PAGE < SIZE:
        count += fills.to(tl.int32)
    start = tl.cumsum(count, 0) - count
    ended = tl.cumsum(fills.to(tl.int32), 0)
    page = tl.load(tables_ptr + row * width + logical, mask=live, other=0).to(tl.int64)
    location = page * SIZE + place
    position = slot
    if PER_PAGE < SIZE:
        position = slot - logical
    nothing = tl.zeros([BLOCK], tl.int64)
    own = nothing + window_spare
    if WINDOWED:
        at = tables_ptr + (row + num_rows) * width + logical
        own = tl.load(at, mask=live, other=0).to(tl.int64) * SIZE + place
    to, end = out_ptr + start, start
    _put_slots(to, most, token, position, row, slot, location, own, live)
    if PER_PAGE < SIZE:
        end = start + 1
        if WINDOWED:
            own += 1
        token = nothing + landmark_id
        _put_slots(to + 1, most, token, position + 1, row, slot + 1, location + 1, own, fills)
    tl.store(out_ptr + 5 * most + ended - 1, end.to(tl.int64), mask=fills)
    tl.store(out_ptr + 6 * most + ended - 1, page, mask=fills)
    tl.store(out_ptr + 8 * most + i, tl.where(live, start, 0).to(tl.int64), mask=inside)
    rest, pad = inside & (i >= tl.sum(count, 0)), out_ptr + i
    own = nothing + window_spare
    _put_slots(pad, most, nothing, nothing, nothing, nothing - 1, nothing + spare, own, rest)
    none = inside & (i >= tl.sum(fills.to(tl.int32), 0))
    tl.store(pad + 5 * most, nothing, mask=none)
    tl.store(pad + 6 * most, nothing - 1, mask=none)
