"""Kernels of dense and window attention over the paged cache.

Query rows of a tile are (token, head of the group) pairs of one KV head: row m is token m // GP,
head m % GP, with the group size G padded to the power of two GP. Products of float32 operands are
IEEE; softmax weights are rounded to the values' dtype before the product with the values.

A head's width is padded to the power of two DP. Without padding no column is masked: a mask, or a
non-contiguous index, would prevent vectorised loads.
"""

from __future__ import annotations

from cairn.ops.cache.kernels import pair_scales, pairs_worth, scales, slot_start, worth
from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, prefetch_l2


@triton.jit
def first_visible(slot, window, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """First slot visible to a token at `slot`; window 0: no window."""
    first = tl.maximum(slot - window + 1, 0)
    if ALIGNED:
        first = first // SIZE * SIZE
    return tl.where(window == 0, 0, first)


@triton.jit
def load_rows(at, alive, DIM: tl.constexpr, DP: tl.constexpr, ONCE: tl.constexpr = False):
    """[M, DP] elements of the rows at addresses `at` [M]; 0 where not alive. ONCE: evict first, the
    rows are not read again."""
    d = tl.arange(0, DP)
    shown = alive[:, None]
    if DP != DIM:
        shown = shown & (d < DIM)[None, :]
    at = at[:, None] + d[None, :]
    if ONCE:
        return tl.load(at, mask=shown, other=0.0, eviction_policy="evict_first")
    return tl.load(at, mask=shown, other=0.0)


@triton.jit
def load_columns(at, alive, DIM: tl.constexpr, DP: tl.constexpr, ONCE: tl.constexpr = False):
    """[DP, N]: `load_rows`, transposed."""
    d = tl.arange(0, DP)
    shown = alive[None, :]
    if DP != DIM:
        shown = shown & (d < DIM)[:, None]
    at = at[None, :] + d[:, None]
    if ONCE:
        return tl.load(at, mask=shown, other=0.0, eviction_policy="evict_first")
    return tl.load(at, mask=shown, other=0.0)


@triton.jit
def load_keys(
    head, line, inner, alive,
    DTYPE: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr,
    ONCE: tl.constexpr = False,
):  # fmt: skip
    """[DP, N] keys of the slots `inner` of pages, which begin at head + line.

    Args:
        DTYPE: dtype that keys of a quantised cache are converted to; others are not converted.
    """
    if head.dtype.element_ty == tl.int8:
        key = tl.trans(load_values(head, line, inner, alive, DTYPE, DIM, SIZE, DP, ONCE))
    else:
        key = load_columns(head + line, alive, DIM, DP, ONCE)
        if head.dtype.element_ty == tl.uint8:
            key = worth(key, scales(head, line, inner, alive, DIM, SIZE)[None, :], DTYPE)
    return key


@triton.jit
def load_values(
    head, line, inner, alive,
    DTYPE: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr,
    ONCE: tl.constexpr = False,
):  # fmt: skip
    """[N, DP]: `load_keys`, not transposed."""
    if head.dtype.element_ty == tl.int8:
        pair = load_rows(head + line, alive, DIM // 2, DP // 2, ONCE)
        value = pairs_worth(pair, pair_scales(head, line, inner, alive, DIM, SIZE, DP), DTYPE)
    else:
        value = load_rows(head + line, alive, DIM, DP, ONCE)
        if head.dtype.element_ty == tl.uint8:
            value = worth(value, scales(head, line, inner, alive, DIM, SIZE)[:, None], DTYPE)
    return value


@triton.jit
def store_rows(at, value, alive, DIM: tl.constexpr, DP: tl.constexpr, ONCE: tl.constexpr = False):
    """Write value [M, DP] to the rows that start at the addresses `at` [M].

    Args:
        ONCE: the rows are read once, much later: evict first.
    """
    d = tl.arange(0, DP)
    shown = alive[:, None]
    if DP != DIM:
        shown = shown & (d < DIM)[None, :]
    at = at[:, None] + d[None, :]
    value = value.to(at.dtype.element_ty)
    if ONCE:
        tl.store(at, value, mask=shown, eviction_policy="evict_first")
    else:
        tl.store(at, value, mask=shown)


@triton.jit
def block_lines(
    cache, table, start, high, page_stride,
    DIM: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[KEYS] int64, offsets in a head of the cache of slots start .. of a row; arbitrary beyond
    slot `high`. start % KEYS = 0."""
    t = start + tl.arange(0, KEYS)
    if SIZE % KEYS == 0:
        page = tl.load(table + start // SIZE).to(tl.int64)
    else:
        page = tl.load(table + t // SIZE, mask=t <= high, other=0).to(tl.int64)
    return page * page_stride + slot_start(cache, t % SIZE, DIM)


@triton.jit
def add_values(best, total, acc, logits, value, EDGE: tl.constexpr, PRECISION: tl.constexpr):
    """A step of the online softmax with logits [M, N] to base 2 and values [N, DP]. best, total:
    [M] running maximum (base 2) and sum; acc: [M, DP]. EDGE: a row may not have seen a key yet."""
    higher = tl.maximum(best, tl.max(logits, 1))
    if EDGE:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    else:
        base = higher
    weight = tl.exp2(logits - base[:, None])
    decay = tl.exp2(best - base)
    acc = acc * decay[:, None]
    acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
    return higher, total * decay + tl.sum(weight, 1), acc


@triton.jit
def attend_block(
    query, best, total, acc, k_head, v_head, line, start, low, high, first, last, mine, factor,
    DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    EDGE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`add_values` for KEYS slots from `start` on, whose offsets are `line` [KEYS].

    Args:
        query: [M, DP].
        k_head, v_head: addresses of the head in page 0.
        low, high: slots outside of this range are not loaded.
        first, last, mine: [M], first and last visible slot of every tile row, and mask of the rows
            that take part.
        factor: scale of the dot products, times log2(e).
        EDGE: some slots are outside low .. high, or not visible to every row.
    """
    t = start + tl.arange(0, KEYS)
    if EDGE:
        inside = (t >= low) & (t <= high)
    else:
        inside = t >= 0
    if MASKED:
        inside = inside & (t % SIZE != SIZE - 1)
    key = load_keys(k_head, line, t % SIZE, inside, query.dtype, DIM, SIZE, DP)
    value = load_values(v_head, line, t % SIZE, inside, query.dtype, DIM, SIZE, DP)
    logits = tl.dot(query, key, input_precision=PRECISION) * factor
    if EDGE:
        visible = mine[:, None] & (t[None, :] <= last[:, None])
        visible = visible & (t[None, :] >= first[:, None]) & inside[None, :]
        logits = tl.where(visible, logits, float("-inf"))
    elif MASKED:
        logits = tl.where(inside[None, :], logits, float("-inf"))
    return add_values(best, total, acc, logits, value, EDGE, PRECISION)


@triton.jit
def attend_blocks(
    query, best, total, acc, k_head, v_head, table, page_stride, begin, end, low, high,
    first, last, mine, factor,
    DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    EDGE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`attend_block` for slots begin .. end - 1 (begin a multiple of KEYS), through the row's page
    table."""
    for start in range(begin, end, KEYS):
        line = block_lines(k_head, table, start, high, page_stride, DIM, SIZE, KEYS)
        best, total, acc = attend_block(
            query, best, total, acc, k_head, v_head, line, start, low, high, first, last, mine,
            factor, DIM, SIZE, DP, KEYS, EDGE, MASKED, PRECISION,
        )  # fmt: skip
    return best, total, acc


@triton.jit
def block_of(
    blocks, start, line, page_lines, column, table, SIZE: tl.constexpr, PAGED: tl.constexpr
):
    """Load slots start .. of a head as a block of a TMA table (`tma.py`).

    Args:
        line, column: position in the table of the head's slot 0 of page 0. page_lines: table lines
            from page to page.
        PAGED: through the page table, with whole blocks in pages of SIZE slots.
    """
    if PAGED:
        line += tl.load(table + start // SIZE) * page_lines + start % SIZE
    else:
        line += start
    return blocks.load([line.to(tl.int32), column])


@triton.jit
def attend_pairs(
    query, best, total, acc, keys, values, k_line, k_page, k_column, v_line, v_page, v_column,
    table, begin, end, factor,
    SIZE: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`attend_blocks` for slots visible to every row, two blocks at a time; factor > 0.

    The products of one block overlap with the softmax of the other.

    Args:
        keys, values: TMA tables, as in `block_of`.
        begin, end: multiples of KEYS; end - begin is one of 2 KEYS.
    """
    for start in range(begin, end, 2 * KEYS):
        other = start + KEYS
        key = block_of(keys, start, k_line, k_page, k_column, table, SIZE, PAGED)
        value = block_of(values, start, v_line, v_page, v_column, table, SIZE, PAGED)
        first = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        key = block_of(keys, other, k_line, k_page, k_column, table, SIZE, PAGED)
        further = block_of(values, other, v_line, v_page, v_column, table, SIZE, PAGED)
        second = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        # Scale after taking the maximum: `x * factor - max` is then one fused multiply-add.
        higher = tl.maximum(tl.max(first, 1), tl.max(second, 1)) * factor
        higher = tl.maximum(best, higher)
        decay = tl.exp2(best - higher)
        weight = tl.exp2(first * factor - higher[:, None])
        acc = acc * decay[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
        total = total * decay + tl.sum(weight, 1)
        weight = tl.exp2(second * factor - higher[:, None])
        acc = tl.dot(weight.to(value.dtype), further, acc, input_precision=PRECISION)
        total += tl.sum(weight, 1)
        best = higher
    return best, total, acc


@triton.jit
def finish(best, total, acc):
    """(o [M, DP], lse [M], natural logarithm): 0 and -inf for a row that saw no key."""
    # A NaN total counts as seen: NaN != 0.
    seen = total != 0
    safe = tl.where(seen, total, 1.0)
    value = (best + tl.log2(safe)) * 0.6931471805599453
    return acc / safe[:, None], tl.where(seen, value, float("-inf"))


@triton.jit
def own_share(start, end, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """The part of the keys [start, end) for this program's split: a multiple of KEYS and at least
    LEAST blocks; all of them with LEAST = 0. The split is the program's third index."""
    if LEAST:
        each = tl.cdiv(tl.cdiv(end - start, KEYS), tl.num_programs(2))
        each = tl.maximum(each, LEAST) * KEYS
        start += tl.program_id(2) * each
        end = tl.minimum(start + each, end)
    return start, end


@triton.jit
def tile_rows(
    row, slot, tokens, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    GP: tl.constexpr,
):  # fmt: skip
    """For the rows of a tile [M]: index in [T, HEADS], whether it is a token, its row in the page
    table (-1: none) and its slot. KV head and tile are the program's first two indices."""
    group: tl.constexpr = HEADS // KV_HEADS
    # Tiles at the end of a sequence attend to the most keys, so they are launched first.
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    m = tl.arange(0, TOKENS * GP)
    token, head = begin + m // GP, tl.program_id(0) * group + m % GP
    alive = (token < tokens) & (m % GP < group)
    own_row = tl.load(row + token, mask=alive, other=-1)
    own_slot = tl.load(slot + token, mask=alive, other=-1).to(tl.int32)
    return token.to(tl.int64) * HEADS + head, alive, own_row, own_slot


@triton.jit
def attend_row(
    query, k_head, v_head, table, own_slot, first, alive, mine, factor, page_stride,
    keys, values, kv, page_lines, head_lines, head_column,
    DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """(best, total, acc), as in `add_values`, of the tile rows of one sequence over its slots
    `first` .. `own_slot` [M]; and whether this program's split has any.

    Args:
        query: [M, DP]; table: of the sequence's pages.
        alive, mine: [M], masks of the rows that are not padding, and of those of the sequence.
        keys, values: as in `tile_kernel`; kv and the parameters after it are only used with them.
        LEAST: as in `tile_kernel`.
    """
    # Each sequence accumulates separately: in a shared sum, weight 0 times another sequence's NaN
    # would be NaN.
    best = tl.full(own_slot.shape, float("-inf"), tl.float32)
    total = tl.zeros(own_slot.shape, tl.float32)
    acc = tl.zeros(query.shape, tl.float32)
    high = tl.max(tl.where(mine, own_slot, -1), 0)
    # Padding tokens have slot -1 and attend to nothing.
    low = tl.min(tl.where(mine & (own_slot >= 0), first, high + 1), 0)
    # Key blocks from `middle` to `after` need no mask: every query of a tile of one sequence sees
    # all of their keys.
    whole = tl.max(tl.where(mine, first, 0), 0) + KEYS - 1
    start = low // KEYS * KEYS
    middle = tl.minimum(tl.maximum(whole // KEYS * KEYS, start), high + 1)
    after = (tl.min(tl.where(mine, own_slot, 2147483647), 0) + 1) // KEYS * KEYS
    others = tl.max((alive & ~mine).to(tl.int32), 0)
    after = tl.where(others > 0, middle, tl.maximum(after, middle))
    start, end = own_share(start, high + 1, KEYS, LEAST)
    middle = tl.minimum(tl.maximum(middle, start), end)
    after = tl.minimum(tl.maximum(after, start), end)
    best, total, acc = attend_blocks(
        query, best, total, acc, k_head, v_head, table, page_stride, start, middle,
        low, high, first, own_slot, mine, factor,
        DIM, SIZE, DP, KEYS, True, MASKED, PRECISION,
    )  # fmt: skip
    if keys is not None:
        after = middle + (after - middle) // (2 * KEYS) * (2 * KEYS)
        best, total, acc = attend_pairs(
            query, best, total, acc, keys, values, kv * head_lines, page_lines,
            kv * head_column, kv * head_lines, page_lines, kv * head_column,
            table, middle, after, factor, SIZE, KEYS, True, PRECISION,
        )  # fmt: skip
    else:
        best, total, acc = attend_blocks(
            query, best, total, acc, k_head, v_head, table, page_stride, middle, after,
            low, high, first, own_slot, mine, factor,
            DIM, SIZE, DP, KEYS, False, MASKED, PRECISION,
        )  # fmt: skip
    best, total, acc = attend_blocks(
        query, best, total, acc, k_head, v_head, table, page_stride, after, end,
        low, high, first, own_slot, mine, factor,
        DIM, SIZE, DP, KEYS, True, MASKED, PRECISION,
    )  # fmt: skip
    return best, total, acc, start < end


@triton.jit(do_not_specialize=["tokens"])
def tile_kernel(
    q, k_cache, v_cache, row, slot, page_table, keys, values, o, lse, tokens,
    window, scale, table_stride, page_stride, head_stride, page_lines, head_lines, head_column,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of tokens and one KV head; sequences in the tile are processed one after
    the other, in any order.

    Args:
        o, lse: with LEAST [T, HEADS, splits, DIM] and [T, HEADS, splits] float32; for a split
            without a key only lse is written.
        keys, values: TMA tables of the caches, with page_lines, head_lines and head_column of
            `tma.Lines`, for blocks visible to all rows; or None.
    """
    kv = tl.program_id(0)
    place, alive, own_row, own_slot = tile_rows(row, slot, tokens, HEADS, KV_HEADS, TOKENS, GP)
    first = first_visible(own_slot, window, SIZE, ALIGNED)
    query = load_rows(q + place * DIM, alive, DIM, DP)
    factor = scale * 1.4426950408889634
    k_head = k_cache + kv.to(tl.int64) * head_stride
    v_head = v_cache + kv.to(tl.int64) * head_stride
    this_row = tl.min(tl.where(alive, own_row, 2147483647), 0)
    while this_row < 2147483647:
        mine = alive & (own_row == this_row)
        best, total, acc, any_seen = attend_row(
            query, k_head, v_head, page_table + this_row * table_stride, own_slot, first, alive,
            mine, factor, page_stride, keys, values, kv, page_lines, head_lines, head_column,
            DIM, SIZE, DP, KEYS, MASKED, PRECISION, LEAST,
        )  # fmt: skip
        result, value = finish(best, total, acc)
        part = place * tl.num_programs(2) + tl.program_id(2) if LEAST else place
        store_rows(o + part * DIM, result, mine & any_seen if LEAST else mine, DIM, DP)
        tl.store(lse + part, value, mask=mine)
        this_row = tl.min(tl.where(alive & (own_row > this_row), own_row, 2147483647), 0)


@triton.jit
def ask_for_block(k_head, v_head, line, DIM: tl.constexpr):
    """Prefetch the keys and values of the slots at `line` [KEYS] into the cache."""
    LINE: tl.constexpr = 1024 // k_head.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = DIM // 2 if k_head.dtype.element_ty == tl.int8 else DIM
    for part in tl.static_range(0, WIDTH, LINE):
        prefetch_l2(k_head + line + part)
        prefetch_l2(v_head + line + part)


@triton.jit
def attend_split(
    q, k_cache, v_cache, row, slot, page_table, o, lse, parts,
    window, scale, table_stride, page_stride, head_stride, token, kv, split, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, ALIGNED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one token and KV head over one split of its keys (split-KV).

    o: [T, HEADS, parts, DIM] and lse: [T, HEADS, parts] float32; splits <= parts.

    Args:
        SINGLE: each split has at most one block of KEYS slots.
        PDL: as in `await_previous`; row, slot and page_table are read before the wait, and the keys
            of a SINGLE block are prefetched.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, GP)
    alive = m < group
    this_slot = tl.load(slot + token).to(tl.int32)
    table = page_table + tl.load(row + token) * table_stride
    low = first_visible(this_slot, window, SIZE, ALIGNED)
    place = token.to(tl.int64) * HEADS + kv * group + m
    at_head = kv.to(tl.int64) * head_stride
    best = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    same = tl.zeros([GP], tl.int32)
    factor = scale * 1.4426950408889634
    if SINGLE:
        begin = (low // KEYS + split) * KEYS
        # Clamp: a block after the last slot is not read, and the page table may not reach that far.
        known = tl.maximum(tl.minimum(begin, this_slot // KEYS * KEYS), 0)
        line = block_lines(k_cache, table, known, this_slot, page_stride, DIM, SIZE, KEYS)
        if PDL:  # noqa: SIM102
            if begin <= this_slot:
                ask_for_block(k_cache + at_head, v_cache + at_head, line, DIM)
    await_previous(PDL)
    query = load_rows(q + place * DIM, alive, DIM, DP)
    if SINGLE:
        best, total, acc = attend_block(
            query, best, total, acc, k_cache + at_head, v_cache + at_head, line, begin, low,
            this_slot, same + low, same + this_slot, alive, factor,
            DIM, SIZE, DP, KEYS, True, MASKED, PRECISION,
        )  # fmt: skip
    else:
        blocks = this_slot // KEYS - low // KEYS + 1
        each = (blocks + splits - 1) // splits
        begin = (low // KEYS + split * each) * KEYS
        end = tl.minimum(begin + each * KEYS, this_slot + 1)
        best, total, acc = attend_blocks(
            query, best, total, acc, k_cache + at_head, v_cache + at_head, table, page_stride,
            begin, end, low, this_slot, same + low, same + this_slot, alive, factor,
            DIM, SIZE, DP, KEYS, True, MASKED, PRECISION,
        )  # fmt: skip
    result, value = finish(best, total, acc)
    store_rows(o + (place * parts + split) * DIM, result, alive, DIM, DP)
    tl.store(lse + place * parts + split, value, mask=alive)


@triton.jit(early=())
def split_kernel(
    q, k_cache, v_cache, row, slot, page_table, o, lse, parts,
    window, scale, table_stride, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per split, KV head and token; o and lse as in `attend_split`. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    attend_split(
        q, k_cache, v_cache, row, slot, page_table, o, lse, parts,
        window, scale, table_stride, page_stride, head_stride,
        tl.program_id(2), tl.program_id(1), tl.program_id(0), tl.num_programs(0),
        HEADS, KV_HEADS, DIM, SIZE, GP, DP, KEYS, ALIGNED, MASKED, PRECISION, False, False,
    )  # fmt: skip
