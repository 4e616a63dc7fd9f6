"""Latent attention over records of the cache, selected by lists of cells or by the page table.

A record [latent | rotary key] is the key of every head, and its latent is the value. A program
handles some heads of one token and one split of its candidates (split-KV). The number of candidates
is read from device memory and bounds the loop, so longer tables cost nothing.

Latents are held as tiles: float8 latents have a scale per 128 elements, or per 64 in records whose
value is the whole record.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def lines_of(
    candidate, inside, source, capacity, page_stride, slot_stride, extra_cells, border,
    extra_capacity, away, SIZE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Offsets in elements of the records of candidates [KEYS], and a mask of those that exist.

    Args:
        source: the token's list of cells or, with PAGED, its row of the page table.
        capacity: number of cells of the cache or, with PAGED, of its pages.
        extra_cells: a second list, for candidates from `border` on, in a cache that begins `away`
            elements after the first; None: no second list.
        SIZE: page size; 0: the cache is one page.
    """
    if PAGED:
        page = tl.load(source + candidate // SIZE, mask=inside, other=-1)
        inside = inside & (page >= 0) & (page < capacity)
        page = tl.where(inside, page, 0).to(tl.int64)
        line = page * page_stride + candidate % SIZE * slot_stride
    else:
        if extra_cells is None:
            cell = tl.load(source + candidate, mask=inside, other=-1)
            inside = inside & (cell >= 0) & (cell < capacity)
        else:
            first = candidate < border
            cell = tl.load(source + candidate, mask=inside & first, other=-1)
            behind = tl.load(
                extra_cells + candidate - border, mask=inside & (candidate >= border), other=-1
            )
            cell = tl.where(first, cell, behind)
            inside = inside & (cell >= 0) & (cell < tl.where(first, capacity, extra_capacity))
        cell = tl.where(inside, cell, 0).to(tl.int64)
        if SIZE:
            line = cell // SIZE * page_stride + cell % SIZE * slot_stride
        else:
            line = cell * slot_stride
        if extra_cells is not None:
            line += tl.where(candidate < border, 0, away)
    return line, inside


@triton.jit
def load_part(at, line, inside, first: tl.constexpr, limit: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns first .. first + WIDTH - 1 of the rows that begin at `at + line` [KEYS]; 0 from
    column `limit` on and in rows that are not inside."""
    column = first + tl.arange(0, WIDTH)
    shown = inside[:, None]
    if first + WIDTH > limit:
        shown = shown & (column < limit)[None, :]
    return tl.load(at + line[:, None] + column[None, :], mask=shown, other=0.0)


@triton.jit
def load_latent(
    cache, scales, line, inside, tile: tl.constexpr,
    LATENT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load a tile [KEYS, WIDTH] of latents, converted to DTYPE.

    Args:
        scales: a float8 cache viewed as float32; None: the cache has no scales.
    """
    value = load_part(cache, line, inside, tile * WIDTH, LATENT, WIDTH)
    if scales is not None:
        at = scales + line // 4 + LATENT // 4 + tile * (WIDTH // 128)
        scale = tl.load(at, mask=inside & (tile * WIDTH < LATENT), other=0.0)
        value = value.to(tl.float8e4nv, bitcast=True)
        # Scales are powers of two: the product is exact in any dtype.
        value = value.to(DTYPE) * scale.to(DTYPE)[:, None]
    return value


@triton.jit
def decoded(code):
    """float32 values of e8m0 bytes; see `cairn.ops.quantization.e8m0`."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 1 << 22, code << 23)
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_whole(
    cache, ropes, line, inside, tile: tl.constexpr,
    PLAIN: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load a tile [KEYS, WIDTH] of records of LATENT elements, converted to DTYPE: PLAIN elements
    in float8 with a scale per 64, the rest in bfloat16."""
    behind: tl.constexpr = PLAIN + (PLAIN // 64 + 7) // 8 * 8
    first: tl.constexpr = tile * WIDTH
    column = first + tl.arange(0, WIDTH)
    code = load_part(cache, line, inside, first, PLAIN, WIDTH)
    value = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    left = tl.load(cache + line + PLAIN + first // 64, mask=inside & (first < PLAIN), other=0)
    at = cache + line + PLAIN + first // 64 + 1
    right = tl.load(at, mask=inside & (first + 64 < PLAIN), other=0)
    scale = tl.where(
        (column < first + 64)[None, :], decoded(left)[:, None], decoded(right)[:, None]
    )
    value = value * scale.to(DTYPE)
    if first + WIDTH > PLAIN:
        shown = inside[:, None] & ((column >= PLAIN) & (column < LATENT))[None, :]
        place = (line[:, None] + behind) // 2 + column[None, :] - PLAIN
        rope = tl.load(ropes + place, mask=shown, other=0.0).to(DTYPE)
        value = tl.where((column < PLAIN)[None, :], value, rope)
    return value


@triton.jit
def load_values(
    cache, scales, ropes, line, inside, tile: tl.constexpr,
    PLAIN: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load a tile [KEYS, WIDTH] of latents in any format, converted to DTYPE; see
    `accumulate_kernel`."""
    if PLAIN:
        value = load_whole(cache, ropes, line, inside, tile, PLAIN, LATENT, WIDTH, DTYPE)
    else:
        value = load_latent(cache, scales, line, inside, tile, LATENT, WIDTH, DTYPE)
    return value


@triton.jit
def attend(
    q0, q1, q2, q3, q_rope, cache, scales, ropes, source, begin, end, factor,
    capacity, page_stride, slot_stride, extra_cells, border, extra_capacity, away,
    LATENT: tl.constexpr, PLAIN: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr,
    PAGED: tl.constexpr, TILES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over candidates begin .. end - 1 of a token, for some of its heads: maximum of
    the logits (base 2) and sum of the weights [LINES], and weighted sums of latents, one [LINES,
    WIDTH] per tile.

    Args:
        q0 .. q3, q_rope: the query's tiles; those from TILES on are ignored.
        ropes: the cache viewed in the dtype of the rotary keys.
        extra_cells .. away: as in `lines_of`.
        factor: softmax scale times log2(e).
    """
    lines: tl.constexpr = q0.shape[0]
    width: tl.constexpr = q0.shape[1]
    dtype: tl.constexpr = q0.dtype
    best = tl.full([lines], float("-inf"), tl.float32)
    total = tl.zeros([lines], tl.float32)
    acc0 = tl.zeros([lines, width], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for start in range(begin, end, KEYS):
        candidate = start + tl.arange(0, KEYS)
        line, inside = lines_of(
            candidate, candidate < end, source, capacity, page_stride, slot_stride,
            extra_cells, border, extra_capacity, away, SIZE, PAGED,
        )  # fmt: skip
        v0 = load_values(
            cache, scales, ropes, line, inside, 0, PLAIN, LATENT, width, dtype
        )  # fmt: skip
        logits = tl.zeros([lines, KEYS], tl.float32)
        if ROPE:
            if scales is None:
                rope = load_part(cache + LATENT, line, inside, 0, ROPE, q_rope.shape[1])
            else:
                behind: tl.constexpr = (LATENT + LATENT // 32) // 2
                rope = load_part(ropes + behind, line // 2, inside, 0, ROPE, q_rope.shape[1])
                rope = rope.to(dtype)
            logits = tl.dot(q_rope, tl.trans(rope), logits, input_precision=PRECISION)
        logits = tl.dot(q0, tl.trans(v0), logits, input_precision=PRECISION)
        if TILES > 1:
            v1 = load_values(
                cache, scales, ropes, line, inside, 1, PLAIN, LATENT, width, dtype
            )  # fmt: skip
            logits = tl.dot(q1, tl.trans(v1), logits, input_precision=PRECISION)
        if TILES > 2:
            v2 = load_values(
                cache, scales, ropes, line, inside, 2, PLAIN, LATENT, width, dtype
            )  # fmt: skip
            logits = tl.dot(q2, tl.trans(v2), logits, input_precision=PRECISION)
            v3 = load_values(
                cache, scales, ropes, line, inside, 3, PLAIN, LATENT, width, dtype
            )  # fmt: skip
            logits = tl.dot(q3, tl.trans(v3), logits, input_precision=PRECISION)
        logits = tl.where(inside[None, :], logits * factor, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(logits - base[:, None])
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(weight, 1)
        best = higher
        share = weight.to(dtype)
        acc0 = tl.dot(share, v0, acc0 * decay[:, None], input_precision=PRECISION)
        if TILES > 1:
            acc1 = tl.dot(share, v1, acc1 * decay[:, None], input_precision=PRECISION)
        if TILES > 2:
            acc2 = tl.dot(share, v2, acc2 * decay[:, None], input_precision=PRECISION)
            acc3 = tl.dot(share, v3, acc3 * decay[:, None], input_precision=PRECISION)
    return best, total, acc0, acc1, acc2, acc3


@triton.jit
def store_tile(at, value, alive, tile: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr):
    """Store value [LINES, WIDTH] as tile `tile` of the rows that begin at `at` [LINES]."""
    column = tile * WIDTH + tl.arange(0, WIDTH)
    shown = alive[:, None] & (column < LATENT)[None, :]
    tl.store(at[:, None] + column[None, :], value.to(at.dtype.element_ty), mask=shown)


@triton.jit
def bounds_of(
    token, begins, ends, cache, extra_cache, extra_ends, most, extra_most, split, splits,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Range begin .. end - 1 of a split's candidates, index of the first candidate of the second
    list, and offset in elements of that list's cache from the first cache; see
    `accumulate_kernel`."""
    begin = 0
    if begins is not None:
        begin = tl.maximum(tl.load(begins + token).to(tl.int32), 0)
    end = tl.minimum(tl.load(ends + token).to(tl.int32), most)
    border = end
    away = token
    if extra_cache is not None:
        border = tl.maximum(end, 0)
        count = tl.minimum(tl.load(extra_ends + token).to(tl.int32), extra_most)
        end = border + tl.maximum(count, 0)
        size: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
        away = (extra_cache.to(tl.int64) - cache.to(tl.int64)) // size
        # Both caches are aligned to 16 bytes.
        away = tl.multiple_of(away, 16 // size)
    each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), KEYS), splits) * KEYS
    begin += split * each
    return begin, tl.minimum(begin + each, end), border, away


@triton.jit(do_not_specialize=["most", "capacity", "extra_most", "extra_capacity"])
def accumulate_kernel(
    q, cache, scales, ropes, cells, table, rows, begins, ends, extra_cache, extra_cells,
    extra_ends, sink, o, lse, peaks, most, capacity, extra_most, extra_capacity, scale, q_token,
    q_head, page_stride, slot_stride, source_stride,
    HEADS: tl.constexpr, LINES: tl.constexpr, LATENT: tl.constexpr, PLAIN: tl.constexpr,
    ROPE: tl.constexpr, WIDTH: tl.constexpr, RP: tl.constexpr, TILES: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a token's heads over one split of its candidates begins .. ends - 1, which index
    its list of cells or, with PAGED, the slots of its row of the page table.

    o: [T, HEADS, splits, LATENT]; lse: [T, HEADS, splits] float32, natural logarithm; peaks:
    likewise the largest logits in base 2, or None.

    Args:
        begins: [T], or None: 0; ends: [T].
        extra_cache, extra_cells, extra_ends, extra_most, extra_capacity: a second cache and list
            of cells, whose candidates follow those of the first list; None: no second list.
        sink: [HEADS] float32 where there is one split, or None.
        most: upper bound of ends.
        PLAIN: float8 elements of records whose value is the whole record, see `load_whole`; 0:
            other records.
        capacity, SIZE: as in `lines_of`; source_stride: row stride of `cells`, or of the page
            table.
    """
    columns: tl.constexpr = (HEADS + LINES - 1) // LINES
    token = (tl.program_id(0) // columns).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    head = tl.program_id(0) % columns * LINES + tl.arange(0, LINES)
    alive = head < HEADS
    begin, end, border, away = bounds_of(
        token, begins, ends, cache, extra_cache, extra_ends, most, extra_most, split, splits, KEYS
    )
    further = extra_cells
    if extra_cache is not None:
        further = extra_cells + token * extra_most
    if PAGED:
        source = table + tl.load(rows + token) * source_stride
    else:
        source = cells + token * source_stride
    own = q + token * q_token
    line = head.to(tl.int64) * q_head
    q0 = load_part(own, line, alive, 0, LATENT, WIDTH)
    q1 = q0
    q2 = q0
    q3 = q0
    if TILES > 1:
        q1 = load_part(own, line, alive, WIDTH, LATENT, WIDTH)
    if TILES > 2:
        q2 = load_part(own, line, alive, 2 * WIDTH, LATENT, WIDTH)
        q3 = load_part(own, line, alive, 3 * WIDTH, LATENT, WIDTH)
    q_rope = load_part(own + LATENT, line, alive, 0, ROPE, RP)
    best, total, acc0, acc1, acc2, acc3 = attend(
        q0, q1, q2, q3, q_rope, cache, scales, ropes, source, begin, end,
        scale * 1.4426950408889634, capacity, page_stride, slot_stride,
        further, border, extra_capacity, away,
        LATENT, PLAIN, ROPE, SIZE, PAGED, TILES, KEYS, PRECISION,
    )  # fmt: skip
    # This condition is true for NaN too.
    seen = total != 0
    safe = tl.where(seen, total, 1.0)
    logs = tl.where(seen, (best + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    share = 1.0 / safe
    if sink is not None:
        bias = tl.load(sink + head, mask=alive, other=0.0)
        share = tl.where(seen, share / (1.0 + tl.exp(bias - logs)), share)
    place = (token * HEADS + head) * splits + split
    tl.store(lse + place, logs, mask=alive)
    if peaks is not None:
        tl.store(peaks + place, best, mask=alive)
    to = o + place * LATENT
    store_tile(to, acc0 * share[:, None], alive, 0, LATENT, WIDTH)
    if TILES > 1:
        store_tile(to, acc1 * share[:, None], alive, 1, LATENT, WIDTH)
    if TILES > 2:
        store_tile(to, acc2 * share[:, None], alive, 2, LATENT, WIDTH)
        store_tile(to, acc3 * share[:, None], alive, 3, LATENT, WIDTH)


@triton.jit(early=(), do_not_specialize=["splits"])
def merge_kernel(
    part_o, part_lse, sink, o, lse, splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one (token, head), COLUMNS elements of the output; a sink is added to the
    sum of weights but not to lse. SPLITS: padded to a power of two. PDL: as in `await_previous`."""
    launch_next(PDL)
    await_previous(PDL)
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logs = tl.load(part_lse + place * splits + s, mask=s < splits, other=float("-inf"))
    shown = (logs != float("-inf"))[:, None] & (column < LATENT)[None, :]
    at = part_o + ((place * splits + s) * LATENT)[:, None] + column[None, :]
    part = tl.load(at, mask=shown, other=0.0)
    best = tl.max(logs, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp(logs - base)
    total = tl.sum(weight, 0)
    safe = tl.where(total != 0, total, 1.0)
    joined = tl.where(total != 0, base + tl.log(safe), float("-inf"))
    if sink is not None:
        safe += tl.exp(tl.load(sink + place % HEADS) - base)
    merged = tl.sum(part * weight[:, None], 0) / safe
    tl.store(o + place * LATENT + column, merged.to(o.dtype.element_ty), mask=column < LATENT)
    tl.store(lse + place, joined, mask=tl.program_id(1) == 0)
