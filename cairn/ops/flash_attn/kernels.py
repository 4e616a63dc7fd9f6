"""The kernels of FlashAttention's interface: one for prefill and decode, and one that merges
splits.

Rows of a tile are (query, head) pairs of one sequence and KV head: row m is query m // HP, head m %
HP of a block of the group. With few rows and narrow heads, a tile covers two adjacent KV heads, so
that whole memory sectors are read: for each query HP heads of the first, then HP of the second.
Keys are numbered from the first valid one. With any mask, the visible keys of a row are one
interval, first .. last. Outputs of ragged queries are stored as those of one sequence.
"""

from __future__ import annotations

from cairn.ops.attention.kernels import attend_pairs, load_columns, load_rows, store_rows
from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def queries_of(row, even, cu_q, used_q):
    """(rows before this sequence's, its rows, those in use, its index if queries are not
    ragged)."""
    ahead = 0
    count = even
    own = row
    if cu_q is not None:
        ahead = tl.load(cu_q + row)
        count = tl.load(cu_q + row + 1) - ahead
        own = row * 0
    used = count
    if used_q is not None:
        used = tl.load(used_q + row)
    return ahead, count, used, own


@triton.jit
def keys_of(row, capacity, cu_k, used_k, leftpad):
    """(slots before a sequence's first key, number of keys)."""
    offset = 0
    length = capacity
    if cu_k is not None:
        offset = tl.load(cu_k + row)
        length = tl.load(cu_k + row + 1) - offset
    if used_k is not None:
        length = tl.load(used_k + row)
    if leftpad is not None:
        pad = tl.load(leftpad + row)
        offset += pad
        length = tl.maximum(length - pad, 0)
    return offset, length


@triton.jit
def seen_of(query, used, length, left, right, chunk):
    """(first, last) [M] of the keys visible to queries; last < first: none."""
    place = query + length - used
    first = tl.where(left >= 0, tl.maximum(place - left, 0), 0)
    last = tl.where(right >= 0, tl.minimum(place + right, length - 1), length - 1)
    size = tl.maximum(chunk, 1)
    block = place // size * size
    first = tl.where(chunk > 0, tl.maximum(first, block), first)
    last = tl.where(chunk > 0, tl.minimum(last, block + size - 1), last)
    outside = (query >= used) | ((chunk > 0) & (place < 0))
    return first, tl.where(outside, -1, last)


@triton.jit
def blocks_of(first, last, alive, split, splits, KEYS: tl.constexpr):
    """(begin, middle, after, end, low, high) of a split: it reads keys begin .. end - 1, those from
    middle to after are seen by every line, none outside low .. high by any."""
    mine = alive & (last >= first)
    high = tl.max(tl.where(mine, last, -1), 0)
    low = tl.minimum(tl.min(tl.where(mine, first, 2147483647), 0), high + 1)
    start = low // KEYS * KEYS
    each = (tl.cdiv(high + 1 - start, KEYS) + splits - 1) // splits * KEYS
    begin = start + split * each
    end = tl.minimum(begin + each, high + 1)
    middle = tl.cdiv(tl.max(tl.where(alive, first, 0), 0), KEYS) * KEYS
    middle = tl.minimum(tl.maximum(middle, begin), tl.maximum(end, begin))
    after = (tl.min(tl.where(alive, last, 2147483647), 0) + 1) // KEYS * KEYS
    return begin, middle, tl.maximum(tl.minimum(after, end), middle), end, low, high


@triton.jit
def lines_at(
    start, offset, inside, table, page_stride, slot_stride,
    SIZE: tl.constexpr, PAGING: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[KEYS] int64, offsets of keys start .. from the head's first.

    Args:
        offset: slots before key 0.
        PAGING: 0: none; 1: any; 2: a block lies in one page, and offset is 0.
    """
    n = tl.arange(0, KEYS)
    if PAGING == 0:
        line = (start + offset + n).to(tl.int64) * slot_stride
    elif PAGING == 2:
        page = tl.load(table + start // SIZE).to(tl.int64)
        line = page * page_stride + (start % SIZE + n).to(tl.int64) * slot_stride
    else:
        slot = start + offset + n
        pages = tl.load(table + slot // SIZE, mask=inside, other=0).to(tl.int64)
        line = pages * page_stride + (slot % SIZE).to(tl.int64) * slot_stride
    return line


@triton.jit
def head_of(x, own, kv, offset, page_stride, head_stride, page_lines, head_lines):
    """The address of a head's keys in a sequence that is not paged, and the table line of its key
    0."""
    at = x + kv * head_stride + own * page_stride
    return at, kv * head_lines + own * page_lines + offset


@triton.jit
def worth_of(descale, pair):
    """The scale of a sequence's KV head, 1 without descale factors."""
    worth = 1.0
    if descale is not None:
        worth = tl.load(descale + pair)
    return worth


@triton.jit
def attend_keys(
    query, extra, best, total, acc, other_acc, k_head, v_head, other_k, other_v, others,
    table, offset, begin, end, low, high, first, last, factor, cap, k_page, k_slot, v_page, v_slot,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, PAGING: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the blocks of keys begin .. end - 1.

    Args:
        query: [M, DP]; extra: [M, VP], the product with values joins the score, or None.
        best, total: [M] running maximum (base 2) and sum; acc: [M, VP].
        other_acc: acc of the lines `others` [M] bool, which are of the KV head at other_k and
            other_v; None, and what it has for the other lines is nothing.
        low, high: no line sees keys outside.
        factor: of the products; times log2(e) where no cap is given.
        EDGE: some keys are not seen by every line.
    """
    for start in range(begin, end, KEYS):
        t = start + tl.arange(0, KEYS)
        inside = (t >= low) & (t <= high) if EDGE else t >= 0
        line = lines_at(start, offset, inside, table, k_page, k_slot, SIZE, PAGING, KEYS)
        key = load_columns(k_head + line, inside, DIM, DP).to(query.dtype)
        line = lines_at(start, offset, inside, table, v_page, v_slot, SIZE, PAGING, KEYS)
        value = load_rows(v_head + line, inside, WIDE, VP).to(query.dtype)
        logits = tl.dot(query, key, input_precision=PRECISION)
        if other_acc is not None:
            # Heads of a slot are adjacent: the other KV head's keys are in the same cache lines.
            line = lines_at(start, offset, inside, table, k_page, k_slot, SIZE, PAGING, KEYS)
            key = load_columns(other_k + line, inside, DIM, DP).to(query.dtype)
            theirs = tl.dot(query, key, input_precision=PRECISION)
            logits = tl.where(others[:, None], theirs, logits)
        if extra is not None:
            logits = tl.dot(extra, tl.trans(value), logits, input_precision=PRECISION)
        logits = logits * factor
        if CAPPED:
            # tanh by exp2, the one exponential that Triton maps to hardware.
            bent = 1.0 - 2.0 / (tl.exp2(logits * (2.8853900817779268 / cap)) + 1.0)
            logits = bent * (cap * 1.4426950408889634)
        if EDGE:
            visible = (t[None, :] >= first[:, None]) & (t[None, :] <= last[:, None])
            logits = tl.where(visible, logits, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher) if EDGE else higher
        weight = tl.exp2(logits - base[:, None])
        decay = tl.exp2(best - base)
        acc = acc * decay[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
        if other_acc is not None:
            line = lines_at(start, offset, inside, table, v_page, v_slot, SIZE, PAGING, KEYS)
            value = load_rows(other_v + line, inside, WIDE, VP).to(query.dtype)
            other_acc = other_acc * decay[:, None]
            other_acc = tl.dot(weight.to(value.dtype), value, other_acc, input_precision=PRECISION)
        total = total * decay + tl.sum(weight, 1)
        best = higher
    if other_acc is not None:
        acc = tl.where(others[:, None], other_acc, acc)
    return best, total, acc


@triton.jit
def attend_blocks(
    query, extra, k_head, v_head, other_k, other_v, others, keys, values,
    k_line, k_lines, k_column, v_line, v_lines, v_column, table, offset, split, splits,
    alive, first, last, factor, cap, k_page, k_slot, v_page, v_slot,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, PAGING: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(best, total, acc) of all keys of a split: edges, whole blocks, edges again.

    Args:
        other_k, other_v, others: as in `attend_keys`, of few lines; or None.
        keys, values: tables of lines for whole blocks, as in `attend_pairs`; or None.
    """
    begin, middle, after, end, low, high = blocks_of(first, last, alive, split, splits, KEYS)
    best = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros([query.shape[0], VP], tl.float32)
    other_acc = None
    if others is not None:
        other_acc = acc
    if query.shape[0] == 16:
        # With 16 rows masks cost little; a single masked loop keeps its pipeline full from the
        # first block to the last.
        after = begin
    else:
        best, total, acc = attend_keys(
            query, extra, best, total, acc, None, k_head, v_head, None, None, None,
            table, offset, begin, middle, low, high, first, last, factor, cap,
            k_page, k_slot, v_page, v_slot,
            DIM, WIDE, SIZE, PAGING, DP, VP, KEYS, True, CAPPED, PRECISION,
        )  # fmt: skip
        if keys is not None:
            after = middle + (after - middle) // (2 * KEYS) * (2 * KEYS)
            best, total, acc = attend_pairs(
                query, best, total, acc, keys, values, k_line, k_lines, k_column, v_line, v_lines,
                v_column, table, middle, after, factor, SIZE, KEYS, PAGING != 0, PRECISION,
            )  # fmt: skip
        else:
            best, total, acc = attend_keys(
                query, extra, best, total, acc, None, k_head, v_head, None, None, None,
                table, offset, middle, after, low, high, first, last, factor, cap,
                k_page, k_slot, v_page, v_slot,
                DIM, WIDE, SIZE, PAGING, DP, VP, KEYS, False, CAPPED, PRECISION,
            )  # fmt: skip
    best, total, acc = attend_keys(
        query, extra, best, total, acc, other_acc, k_head, v_head, other_k, other_v, others,
        table, offset, after, end, low, high, first, last, factor, cap,
        k_page, k_slot, v_page, v_slot,
        DIM, WIDE, SIZE, PAGING, DP, VP, KEYS, True, CAPPED, PRECISION,
    )  # fmt: skip
    return best, total, acc


@triton.jit
def store_part(
    o, part_lse, part, acc, total, logs, alive, WIDE: tl.constexpr, VP: tl.constexpr
):  # fmt: skip
    """Write the states of one split [M], at `part` [M]."""
    # A NaN total counts as seen: NaN != 0.
    seen = total != 0
    result = acc / tl.where(seen, total, 1.0)[:, None]
    store_rows(o + part * WIDE, result, alive, WIDE, VP)
    tl.store(part_lse + part, tl.where(seen, logs, float("-inf")), mask=alive)


@triton.jit
def store_whole(
    o, lse, sinks, head, acc, best, total, logs, alive, WIDE: tl.constexpr, VP: tl.constexpr
):  # fmt: skip
    """Write the results of all keys [M], at the addresses o and lse [M]; sinks [HEADS], or None."""
    seen = total != 0
    if sinks is not None:
        sink = tl.load(sinks + head, mask=alive, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - tl.where(seen, best, 0.0))
    result = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    store_rows(o, result, alive, WIDE, VP)
    tl.store(lse, tl.where(seen, logs, float("inf")), mask=alive)


@triton.jit(
    early=(),
    do_not_specialize=["left", "right", "chunk", "batch", "tiles", "even", "capacity", "splits"],
)
def flash_kernel(
    q, k, v, qv, keys, values, o, lse, part_lse, sinks, page_table, batch_idx, leftpad,
    cu_q, cu_k, used_q, used_k, q_descale, k_descale, v_descale,
    scale, cap, left, right, chunk, batch, tiles, even, capacity, splits,
    q_batch, q_token, q_head, qv_batch, qv_token, qv_head, k_page, k_slot, k_head,
    v_page, v_slot, v_head, o_batch, o_token, o_head, lse_batch, lse_head, table_stride,
    k_lines, k_head_lines, k_column, v_lines, v_head_lines, v_column,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, PAGING: tl.constexpr, TOKENS: tl.constexpr, HP: tl.constexpr,
    JOINT: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one sequence, a KV head (or a block of its group), a split of the keys.

    Args:
        o, lse: with one split the results; else o is [lines, HEADS, splits, WIDE] float32, part_lse
            [lines, HEADS, splits], and lse is not written.
        even: queries of every sequence; those of all together where they are ragged.
        capacity: keys of a sequence of which nothing else is known.
        keys, values: k and v as tables of lines (`lines.Lines`) for blocks that all see; or None.
        JOINT: KV heads of a tile, 1 or 2; then there are no scales, and no parts of a group.
        DTYPE: of the products; PDL: as in `await_previous`.
    """
    await_previous(PDL)
    group: tl.constexpr = HEADS // KV_HEADS
    parts: tl.constexpr = (group + HP - 1) // HP
    row, split = (tl.program_id(0) % batch).to(tl.int64), tl.program_id(2)
    # Tiles at the end of a sequence attend to the most keys, so they are launched first.
    tile = tiles - 1 - tl.program_id(0) // batch
    kv = (tl.program_id(1) // parts * JOINT).to(tl.int64)
    ahead, count, used, own = queries_of(row, even, cu_q, used_q)
    if tile * TOKENS >= count:
        return
    offset, length = keys_of(row, capacity, cu_k, used_k, leftpad)
    m = tl.arange(0, TOKENS * JOINT * HP)
    query = tile * TOKENS + m // (JOINT * HP)
    member = tl.program_id(1) % parts * HP + m % HP
    alive = (query < count) & (member < group)
    head = (kv + m // HP % JOINT) * group + member
    first, last = seen_of(query, used, length, left, right, chunk)
    line = (ahead + query).to(tl.int64)
    place = q + own * q_batch + line * q_token + head * q_head
    asked = load_rows(place, alive, DIM, DP).to(DTYPE)
    extra = None
    if qv is not None:
        place = qv + own * qv_batch + line * qv_token + head * qv_head
        extra = load_rows(place, alive, WIDE, VP).to(DTYPE)
    pair = row * KV_HEADS + kv
    factor = worth_of(q_descale, pair) * worth_of(k_descale, pair) * scale
    if not CAPPED:
        factor *= 1.4426950408889634
    table, own_keys = page_table, row * 0
    if PAGING != 0:
        table = page_table + row * table_stride
    elif cu_k is None:
        own_keys = row
        if batch_idx is not None:
            own_keys = tl.load(batch_idx + row).to(tl.int64)
    k_at, k_line = head_of(k, own_keys, kv, offset, k_page, k_head, k_lines, k_head_lines)
    v_at, v_line = head_of(v, own_keys, kv, offset, v_page, v_head, v_lines, v_head_lines)
    others = None
    if JOINT == 2:
        others = m // HP % 2 == 1
    best, total, acc = attend_blocks(
        asked, extra, k_at, v_at, k_at + k_head, v_at + v_head, others, keys, values,
        k_line, k_lines, (kv * k_column).to(tl.int32),
        v_line, v_lines, (kv * v_column).to(tl.int32), table, offset, split, splits,
        alive, first, last, factor, cap, k_page, k_slot, v_page, v_slot,
        DIM, WIDE, SIZE, PAGING, DP, VP, KEYS, CAPPED, PRECISION,
    )  # fmt: skip
    logs = (best + tl.log2(tl.where(total != 0, total, 1.0))) * 0.6931471805599453
    acc = acc * worth_of(v_descale, pair)
    if part_lse is not None:
        part = ((own * even + line) * HEADS + head) * splits + split
        store_part(o, part_lse, part, acc, total, logs, alive, WIDE, VP)
    else:
        place = o + own * o_batch + line * o_token + head * o_head
        at = lse + own * lse_batch + head * lse_head + line
        store_whole(place, at, sinks, head, acc, best, total, logs, alive, WIDE, VP)


@triton.jit(early=(), do_not_specialize=["longest", "even", "splits"])
def join_splits_kernel(
    part_o, part_lse, o, lse, sinks, cu_q, longest, even, splits,
    o_batch, o_token, o_head, lse_batch, lse_head,
    HEADS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Join the splits of one (query, head), a block of its numbers; as `flash_kernel` stores."""
    launch_next(PDL)
    await_previous(PDL)
    row = (tl.program_id(0) // longest).to(tl.int64)
    query = tl.program_id(0) % longest
    head = tl.program_id(1)
    ahead, count, _, own = queries_of(row, even, cu_q, None)
    if query >= count:
        return
    line = (ahead + query).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    part = ((own * even + line) * HEADS + head) * splits
    logs = tl.load(part_lse + part + s, mask=s < splits, other=float("-inf"))
    at = part_o + (part + s[:, None]) * WIDE + d[None, :]
    value = tl.load(at, mask=(s < splits)[:, None] & (d < WIDE)[None, :], other=0.0)
    best = tl.max(logs, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp(logs - base)
    total = tl.sum(weight, 0)
    seen = total != 0
    whole = total
    if sinks is not None:
        whole += tl.exp(tl.load(sinks + head).to(tl.float32) - base)
    merged = tl.sum(value * weight[:, None], 0) / tl.where(seen, whole, 1.0)
    place = o + own * o_batch + line * o_token + head * o_head + d
    tl.store(place, tl.where(seen, merged, 0.0).to(o.dtype.element_ty), mask=d < WIDE)
    logged = tl.where(seen, base + tl.log(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(lse + own * lse_batch + head * lse_head + line, logged, mask=tl.program_id(2) == 0)


@triton.jit
def end_of(seqlens, page_table, batch_idx, row, place, table_stride, SIZE: tl.constexpr):
    """Page (or row of the cache) and slot, int64, of new token `place` of a sequence."""
    slot = tl.load(seqlens + row) + place
    if page_table is not None:
        page = tl.load(page_table + row.to(tl.int64) * table_stride + slot // SIZE)
        slot = slot % SIZE
    elif batch_idx is not None:
        page = tl.load(batch_idx + row)
    else:
        page = row
    return page.to(tl.int64), slot.to(tl.int64)


@triton.jit(early=(), do_not_specialize=["count", "batch"])
def append_kernel(
    k, v, k_cache, v_cache, seqlens, cu_seqlens, page_table, batch_idx, count, batch,
    k_row, k_token, k_head, v_row, v_token, v_head,
    to_page, to_slot, to_head, into_page, into_slot, into_head, table_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HP heads of a new key or value, each of which has PARTS programs, to their place.

    Args:
        count: new tokens of every sequence, of which `batch` is the number; ROWS: that, padded,
            where they are ragged.
        to_, into_: strides of k_cache and v_cache.
        ONE: count is 1.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    line, part = row_and_part(2 * PARTS)
    line = line.to(tl.int32)
    if cu_seqlens is not None:
        n = tl.arange(0, ROWS)
        ends = tl.load(cu_seqlens + 1 + n, mask=n < batch, other=2147483647)
        row = tl.sum((ends <= line).to(tl.int32), 0)
        begin = tl.load(cu_seqlens + tl.minimum(row, batch - 1))
        if (row >= batch) | (line < begin):
            return
        own = 0
        place = line - begin
        token = line.to(tl.int64)
    elif ONE:
        row = line
        own = row.to(tl.int64)
        place = 0
        token = 0
    else:
        row = line // count
        own = row.to(tl.int64)
        place = line % count
        token = place.to(tl.int64)
    h = (part % PARTS * HP + tl.arange(0, HP)).to(tl.int64)
    if part < PARTS:
        key = load_rows(k + own * k_row + token * k_token + h * k_head, h < HEADS, DIM, DP)
        # The barrier keeps the loads of keys ahead of the two dependent loads that find their slot.
        tl.debug_barrier()
        page, slot = end_of(seqlens, page_table, batch_idx, row, place, table_stride, SIZE)
        to = k_cache + page * to_page + slot * to_slot + h * to_head
        store_rows(to, key, h < HEADS, DIM, DP)
    else:
        value = load_rows(v + own * v_row + token * v_token + h * v_head, h < HEADS, WIDE, VP)
        tl.debug_barrier()
        page, slot = end_of(seqlens, page_table, batch_idx, row, place, table_stride, SIZE)
        into = v_cache + page * into_page + slot * into_slot + h * into_head
        store_rows(into, value, h < HEADS, WIDE, VP)
