"""Kernel of the cache write, and device functions that read a quantized cache."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous
from cairn.ops.quantization.kernels import (
    e2m1_words,
    e4m3_rounded,
    fp8_by_integers,
    inverse_of,
    largest_bits,
)


@triton.jit
def quantized(x):
    """The rows of x [M, N] as bytes, see `cairn.ops.cache.quantized`: numbers and exponents [M].

    Conversions are done on integers, since not every device that runs these kernels has e4m3
    instructions.
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
def quantized_pairs(x):
    """The rows of x [M, N] in 4 bits, see `cairn.ops.cache.quantized`: pairs of codes [M, N / 2]
    and scales [M, N / 16], as bytes; N is a multiple of 16."""
    M: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // 16
    number = tl.reshape(x.to(tl.float32), (M * BLOCKS, 8, 2))
    bits = tl.max(largest_bits(number, 2), 1)
    largest = bits.to(tl.float32, bitcast=True)
    scale, code = e4m3_rounded(largest * 0.16666666666666666)
    place = tl.arange(0, 2)[None, None, :] * 4
    pairs = e2m1_words(number, inverse_of(scale)[:, None, None], place)
    code = tl.where(bits < 0x7F800000, code, 255).to(tl.int8)
    return tl.reshape(pairs.to(tl.int8), (M, 8 * BLOCKS)), tl.reshape(code, (M, BLOCKS))


@triton.jit
def slot_start(cache, inner, DIM: tl.constexpr):
    """Offsets of the codes of slots `inner` within the block of their page and head; in an int8
    cache a byte holds two codes."""
    WIDTH: tl.constexpr = DIM // 2 if cache.dtype.element_ty == tl.int8 else DIM
    return inner * WIDTH


@triton.jit
def scales(head, line, inner, alive, DIM: tl.constexpr, SIZE: tl.constexpr):
    """[N] float32: the scales of the slots `inner` of pages whose blocks begin at head + line."""
    exponent = tl.load(head + line + (SIZE * DIM + inner * (1 - DIM)), mask=alive, other=0)
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def worth(byte, scale, DTYPE: tl.constexpr):
    """e4m3 bytes dequantized by their scales, as DTYPE."""
    bits = ((byte.to(tl.int32) & 0x80) << 24) | ((byte.to(tl.int32) & 0x7F) << 20)
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return (number * scale).to(DTYPE)


@triton.jit
def pair_scales(
    head, line, inner, alive, DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """[N, DP / 16] float32: `scales`, of a cache in 4 bits."""
    b = tl.arange(0, DP // 16)
    shown = alive[:, None]
    if DP != DIM:
        shown = shown & (b < DIM // 16)[None, :]
    at = line + (SIZE * (DIM // 2) + inner * (DIM // 16 - DIM // 2))
    code = tl.load(head + at[:, None] + b[None, :], mask=shown, other=0).to(tl.int32) & 0xFF
    number = (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(code == 255, float("nan"), number)


@triton.jit
def pairs_worth(pair, scale, DTYPE: tl.constexpr):
    """[N, DP] of DTYPE: pairs of e2m1 codes [N, DP / 2] dequantized by scales [N, DP / 16]."""
    N: tl.constexpr = scale.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    # By a broadcast: after tl.join the compiler gives operands of tensor cores a layout of at least
    # 32 elements along K, also where K is 16.
    code = pair.to(tl.int32)[:, :, None] >> (tl.arange(0, 2) * 4)[None, None, :]
    # The lowest bits of exponent and mantissa: a number is 2 ** 126 times that.
    bits = tl.reshape(((code & 7) << 22) | ((code & 8) << 28), (N, BLOCKS, 16))
    number = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return tl.reshape((number * scale[:, :, None]).to(DTYPE), (N, BLOCKS * 16))


@triton.jit
def store_slot(
    cache, block, inner, x, written, DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Store x [M, DP] in slot `inner` of M heads' pages, which begin at `block` [M], where
    written."""
    d = tl.arange(0, DP)
    shown = written[:, None] & (d < DIM)[None, :]
    start = block + slot_start(cache, inner, DIM)
    if cache.dtype.element_ty == tl.int8:
        pair, scale = quantized_pairs(x)
        d = tl.arange(0, DP // 2)
        shown = written[:, None] & (d < DIM // 2)[None, :]
        b = tl.arange(0, DP // 16)
        behind = block + SIZE * (DIM // 2) + inner * (DIM // 16)
        mask = written[:, None] & (b < DIM // 16)[None, :]
        tl.store(cache + behind[:, None] + b[None, :], scale, mask=mask)
        x = pair
    elif cache.dtype.element_ty == tl.uint8:
        x, exponent = quantized(x)
        tl.store(cache + block + SIZE * DIM + inner, exponent, mask=written)
    tl.store(cache + start[:, None] + d[None, :], x, mask=shown)


@triton.jit(early=())
def write_kv_kernel(
    k, v, k_cache, v_cache, location,
    k_stride, v_stride, page_stride, head_stride,
    SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PARTS: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store HP key and value heads of one token, which has PARTS programs, in its slot; a negative
    location is not written. PDL: as in `await_previous`."""
    await_previous(PDL)
    token, part = row_and_part(PARTS)
    head = part * HP + tl.arange(0, HP)
    d = tl.arange(0, DP)
    inside = (head < HEADS)[:, None] & (d < DIM)[None, :]
    read = head[:, None] * DIM + d[None, :]
    # Loads are issued before the location is known; only the stores depend on it.
    key = tl.load(k + token * k_stride + read, mask=inside, other=0.0)
    value = tl.load(v + token * v_stride + read, mask=inside, other=0.0)
    at = tl.load(location + token)
    written = (head < HEADS) & (at >= 0)
    block = (at // SIZE) * page_stride + head.to(tl.int64) * head_stride
    store_slot(k_cache, block, at % SIZE, key, written, DIM, SIZE, DP)
    store_slot(v_cache, block, at % SIZE, value, written, DIM, SIZE, DP)


@triton.jit
def _put_slots(at, most, token, position, row, slot, location, own, mask):
    """Store the fields of slots, one row per field."""
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
    """One program whose lanes are first table cells, then rows, then padding slots. PDL: as in
    `await_previous`; the next kernel is not launched before this one is done."""
    await_previous(PDL, False)
    i = tl.arange(0, BLOCK)
    inside = i < most
    cell = tl.load(cells_ptr + i, mask=inside, other=0)
    tl.store(tables_ptr + cell, tl.load(pages_ptr + i, mask=inside, other=0), mask=inside)
    # Make the table cells stored above visible to all threads of the program.
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


@triton.jit
def mark_entries(
    indices, row, page_table, frame_of, found, sources, targets, head, entries, topk, table_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the page of each entry to `found`, and -1 - e to frame_of of a page without a frame
    whose first entry is e. Entry e is indices[e // topk, head, e % topk]."""
    for begin in range(0, entries, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < entries
        token = e // topk
        at = (token * HEADS + head) * topk + e % topk
        logical = tl.load(indices + at, mask=inside, other=-1)
        selected = logical >= 0
        line = tl.load(row + token, mask=selected, other=0) * table_stride
        page = tl.load(page_table + line + logical, mask=selected, other=-1)
        tl.atomic_max(frame_of + page, -1 - e, mask=selected)
        tl.store(found + at, page, mask=inside)
        tl.store(sources + e, -1, mask=inside)
        tl.store(targets + e, -1, mask=inside)


@triton.jit
def give_frames(
    frame_of, page_in, used, sources, targets, hand, step, missing, first_page, first_frame, frames,
    LAYER_HEADS: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """Assign frames to the `missing` pages in sources: the next ones from the clock hand `hand` on
    that this call (number `step`) has not used. Returns the new position of the hand."""
    given, searched, last = 0, 0, hand - 1
    while given < missing:
        i = searched + tl.arange(0, SEARCHED)
        frame = (hand + i) % frames
        free = (i < frames) & (tl.load(used + frame) != step)
        rank = given + tl.cumsum(free.to(tl.int32), 0) - 1
        taken = free & (rank < missing)
        before = tl.load(page_in + frame, mask=taken, other=-1)
        held = tl.load(frame_of + before, mask=before >= 0, other=-1)
        tl.store(frame_of + before, -(1 << 31), mask=(before >= 0) & (held == frame))
        page = tl.load(sources + rank, mask=taken, other=0) // LAYER_HEADS - first_page
        tl.store(page_in + frame, page.to(tl.int32), mask=taken)
        tl.store(frame_of + page, frame.to(tl.int32), mask=taken)
        tl.store(used + frame, step + tl.zeros([SEARCHED], tl.int64), mask=taken)
        at = (first_frame + frame) * LAYER_HEADS + tl.program_id(0) % LAYER_HEADS
        tl.store(targets + rank, at, mask=taken)
        last = tl.maximum(last, tl.max(tl.where(taken, hand + i, -1), 0))
        given += tl.sum(free.to(tl.int32), 0)
        searched += SEARCHED
    return (last + 1) % frames


@triton.jit
def resolve_frames_kernel(
    indices, row, page_table, frame_of, page_in, used, state, renewed, found, sources, targets,
    entries, changed, topk, table_stride, pages, frames,
    HEADS: tl.constexpr, LAYER_HEADS: tl.constexpr, BLOCK: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """resolve_frames of one head; LAYER_HEADS: heads of a layer."""
    head = tl.program_id(0).to(tl.int64)
    layer = head // LAYER_HEADS
    frame_of += head * pages
    page_in += head * frames
    used += head * frames
    sources += head * entries
    targets += head * entries
    state += head * 4
    hand, step = tl.load(state), tl.load(state + 1) + 1
    hits, misses = tl.load(state + 2), tl.load(state + 3)
    if renewed is not None:
        for begin in range(0, changed, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            page = tl.load(renewed + i, mask=i < changed, other=-1)
            tl.store(frame_of + page, -(1 << 31), mask=page >= 0)
        tl.debug_barrier()
    mark_entries(
        indices, row, page_table, frame_of, found, sources, targets, head, entries, topk,
        table_stride, HEADS, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()
    missing, present = 0, 0
    for begin in range(0, entries, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        at = (e // topk * HEADS + head) * topk + e % topk
        page = tl.load(found + at, mask=e < entries, other=-1)
        frame = tl.load(frame_of + page, mask=page >= 0, other=-(1 << 31))
        hit = frame >= 0
        before = tl.atomic_xchg(used + frame, step + tl.zeros([BLOCK], tl.int64), mask=hit)
        present += tl.sum((hit & (before != step)).to(tl.int32), 0)
        first = (page >= 0) & (frame == -1 - e)
        rank = missing + tl.cumsum(first.to(tl.int32), 0) - 1
        at = (layer * pages + page) * LAYER_HEADS + head % LAYER_HEADS
        tl.store(sources + rank, at, mask=first)
        missing += tl.sum(first.to(tl.int32), 0)
    tl.debug_barrier()
    hand = give_frames(
        frame_of, page_in, used, sources, targets, hand, step, missing, layer * pages,
        layer * frames, frames, LAYER_HEADS, SEARCHED,
    )  # fmt: skip
    tl.debug_barrier()
    for begin in range(0, entries, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        at = (e // topk * HEADS + head) * topk + e % topk
        page = tl.load(found + at, mask=e < entries, other=-1)
        tl.store(found + at, tl.load(frame_of + page, mask=page >= 0), mask=page >= 0)
    tl.store(state, hand)
    tl.store(state + 1, step)
    tl.store(state + 2, hits + present)
    tl.store(state + 3, misses + missing)
