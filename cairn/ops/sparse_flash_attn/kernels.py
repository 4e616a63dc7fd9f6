"""Kernels of the vertical-slash conversion, and of attention to the listed blocks and columns."""

from __future__ import annotations

from cairn.ops.attention.kernels import load_columns, load_rows, store_rows
from cairn.ops.flash_attn.kernels import keys_of, queries_of
from cairn.ops.gpu import tl, triton


@triton.jit
def ahead(slashes, n, bound, CHUNK: tl.constexpr):
    """How many of the n slashes reach bound [L]."""
    found = tl.zeros_like(bound)
    for begin in range(0, n, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        slash = tl.load(slashes + at, mask=at < n, other=-2147483648)
        found += tl.sum((slash[None, :] >= bound[:, None]).to(tl.int32), 1)
    return found


@triton.jit
def advance(moving, slashes, next, low, high, follow, count, end, kv, blocks, m, n):
    """Advance to the next slash in the lanes that are moving: see `vertical_slash`."""
    x = tl.maximum(end - tl.load(slashes + next, mask=moving, other=0), m)
    opens = moving & (x > high + m)
    grows = moving & (x > high) & (x <= high + m)
    low = tl.where(opens, x - m, low)
    high = tl.where(opens, x, tl.where(grows, high + m, high))
    follow = tl.where(opens, low, follow)
    adds = (opens | grows) & (follow < tl.minimum(high, kv))
    tl.store(blocks + count, follow, mask=adds)
    count += adds.to(tl.int32)
    follow += tl.where(adds, n, 0)
    return next + moving.to(tl.int32), low, high, follow, count


@triton.jit
def any_of(lanes):
    """Whether one of the lanes is true."""
    return tl.max(lanes.to(tl.int32), 0) > 0


@triton.jit
def convert_kernel(
    q_seqlens, kv_seqlens, verticals, slashes, vertical_counts, slash_counts,
    block_count, block_offset, column_count, column_index,
    heads, row_blocks, nv, ns, m, n,
    CAUSAL: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """L row blocks of a head. The tables are zero before."""
    line = tl.program_id(1).to(tl.int64)
    q = tl.load(q_seqlens + line // heads)
    kv = tl.load(kv_seqlens + line // heads)
    verticals += line * nv
    slashes += line * ns
    v_used = nv
    s_used = ns
    if vertical_counts is not None:
        v_used = tl.load(vertical_counts + line % heads)
    if slash_counts is not None:
        s_used = tl.load(slash_counts + line % heads)
    block = tl.program_id(0) * L + tl.arange(0, L)
    start = block * m
    alive = (block < row_blocks) & (start < q)
    place = line * row_blocks + block
    blocks = block_offset + place * ns
    columns = column_index + place * nv
    if CAUSAL:
        end = start + m + kv - q
        behind = end
    else:
        end = start + m + kv
        behind = tl.zeros_like(start) + kv
    first = tl.minimum(ahead(slashes, s_used, end, CHUNK), tl.maximum(s_used - 1, 0))
    until = tl.zeros_like(start) + s_used
    if not CAUSAL:
        until = ahead(slashes, s_used, start, CHUNK)
    own = tl.load(slashes + first, mask=alive, other=0)
    bare = (own > end) | (s_used == 0)
    high = tl.maximum(end - own, m)
    low = tl.where(bare, behind, high - m)
    high = tl.where(bare, behind + n, high)
    adds = alive & (low < tl.minimum(high, kv))
    tl.store(blocks, low, mask=adds)
    count = adds.to(tl.int32)
    follow = low + tl.where(adds, n, 0)
    next = first + 1
    listed = tl.zeros_like(count)
    for j in range(v_used):
        vertical = tl.load(verticals + j)
        moving = alive & (high <= vertical) & (next < until)
        while any_of(moving):
            next, low, high, follow, count = advance(
                moving, slashes, next, low, high, follow, count, end, kv, blocks, m, n
            )
            moving = alive & (high <= vertical) & (next < until)
        column = alive & (vertical < low)
        if not CAUSAL:
            column = alive & tl.where(high <= vertical, vertical < kv, vertical < low)
        else:
            column = column & (vertical < high)
        tl.store(columns + listed, tl.zeros_like(listed) + vertical, mask=column)
        listed += column.to(tl.int32)
    moving = alive & (next < until)
    while any_of(moving):
        next, low, high, follow, count = advance(
            moving, slashes, next, low, high, follow, count, end, kv, blocks, m, n
        )
        moving = alive & (next < until)
    tl.store(block_count + place, count, mask=alive)
    tl.store(column_count + place, listed, mask=alive)


@triton.jit(do_not_specialize=["blocks_wide", "columns_wide", "half"])
def single_columns_kernel(
    block_count, block_offset, column_count, column_index, single,
    blocks_wide, columns_wide, half, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The columns of a list that are not repeated and lie in none of its blocks; -1 for others.

    Args:
        half: a power of two, 2 * half > blocks_wide.
    """
    table = tl.program_id(0).to(tl.int64)
    blocks = tl.minimum(tl.load(block_count + table), blocks_wide)
    columns = tl.minimum(tl.load(column_count + table), columns_wide)
    offsets = block_offset + table * blocks_wide
    listed = column_index + table * columns_wide
    for start in range(0, columns, CHUNK):
        n = start + tl.arange(0, CHUNK)
        t = tl.load(listed + n, mask=n < columns, other=-1)
        before = tl.load(listed + n - 1, mask=(n < columns) & (n > 0), other=-1)
        begun = tl.zeros_like(t)
        step = half
        while step > 0:
            further = begun + step
            begin = tl.load(offsets + further - 1, mask=further <= blocks, other=2147483647)
            begun = tl.where(begin <= t, further, begun)
            step = step // 2
        last = tl.load(offsets + begun - 1, mask=begun > 0, other=0)
        alone = (t != before) & ((begun == 0) | (t - last >= BLOCK))
        tl.store(single + table * columns_wide + n, tl.where(alone, t, -1), mask=n < columns)


@triton.jit
def softmax_step(
    query, best, total, acc, k_head, v_head, k_token, v_token, t, inside, place, factor, cap,
    DIM: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A step of the online softmax, as in `cairn.ops.flash_attn.kernels`, over the keys t inside.

    Args:
        place: [M] last key that each query sees, if CAUSAL.
    """
    line = t.to(tl.int64)
    key = load_columns(k_head + line * k_token, inside, DIM, DP)
    value = load_rows(v_head + line * v_token, inside, DIM, DP)
    logits = tl.dot(query, key, input_precision=PRECISION) * factor
    if CAPPED:
        bent = 1.0 - 2.0 / (tl.exp2(logits * (2.8853900817779268 / cap)) + 1.0)
        logits = bent * (cap * 1.4426950408889634)
    visible = inside[None, :]
    if CAUSAL:
        visible = visible & (t[None, :] <= place[:, None])
    logits = tl.where(visible, logits, float("-inf"))
    higher = tl.maximum(best, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(logits - base[:, None])
    decay = tl.exp2(best - base)
    acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
    return higher, total * decay + tl.sum(weight, 1), acc


@triton.jit(do_not_specialize=["even_q", "even_k", "blocks_wide", "columns_wide", "rows"])
def attend_listed_kernel(
    q, k, v, o, lse, block_count, block_offset, column_count, single, cu_q, cu_k,
    factor, cap, even_q, even_k, rows, blocks_wide, columns_wide,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    o_batch, o_token, o_head, lse_batch, lse_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A row block of BLOCK queries of one head.

    Args:
        factor: of the products; times log2(e) where no cap is given.
        single: columns as `single_columns_kernel` leaves them.
        even_q, even_k: queries and keys of every sequence, unless cu_q and cu_k are given.
        rows: row blocks of the tables; blocks_wide, columns_wide: lengths of their lists.
        KEYS: read at a time, BLOCK or a part of it.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    # Late row blocks see the most keys: they start first.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    ahead, count, _, own = queries_of(row, even_q, cu_q, None)
    if number * BLOCK >= count:
        return
    offset, length = keys_of(row, even_k, cu_k, None, None)
    own_keys = row if cu_k is None else row * 0
    query = number * BLOCK + tl.arange(0, BLOCK)
    alive = query < count
    line = (ahead + query).to(tl.int64)
    asked = load_rows(q + own * q_batch + line * q_token + head * q_head, alive, DIM, DP)
    first = tl.zeros_like(row) + offset
    k_at = k + own_keys * k_batch + first * k_token + head // GROUP * k_head
    v_at = v + own_keys * v_batch + first * v_token + head // GROUP * v_head
    table = (row * HEADS + head) * rows + number
    blocks = tl.minimum(tl.load(block_count + table), blocks_wide)
    columns = tl.minimum(tl.load(column_count + table), columns_wide)
    offsets = block_offset + table * blocks_wide
    listed = single + table * columns_wide
    place = query + length - count
    limit = length
    if CAUSAL:
        limit = tl.minimum(length, (number + 1) * BLOCK + length - count)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DP], tl.float32)
    n = tl.arange(0, KEYS)
    parts: tl.constexpr = BLOCK // KEYS
    for step in range(blocks * parts):
        block = step // parts
        begin = tl.load(offsets + block)
        following = tl.load(offsets + block + 1, mask=block + 1 < blocks, other=2147483647)
        t = begin + step % parts * KEYS + n
        inside = (t >= 0) & (t < tl.minimum(limit, following))
        best, total, acc = softmax_step(
            asked, best, total, acc, k_at, v_at, k_token, v_token, t, inside, place, factor, cap,
            DIM, DP, CAUSAL, CAPPED, PRECISION,
        )  # fmt: skip
    for start in range(0, columns, KEYS):
        there = start + n < columns
        t = tl.load(listed + start + n, mask=there, other=-1)
        inside = (t >= 0) & (t < limit)
        best, total, acc = softmax_step(
            asked, best, total, acc, k_at, v_at, k_token, v_token, t, inside, place, factor, cap,
            DIM, DP, CAUSAL, CAPPED, PRECISION,
        )  # fmt: skip
    # NaN is seen too.
    seen = total != 0
    divisor = tl.where(seen, total, 1.0)
    result = tl.where(seen[:, None], acc / divisor[:, None], 0.0)
    store_rows(o + own * o_batch + line * o_token + head * o_head, result, alive, DIM, DP)
    logs = (best + tl.log2(divisor)) * 0.6931471805599453
    at = lse + own * lse_batch + head * lse_head + line
    tl.store(at, tl.where(seen, logs, float("inf")), mask=alive)
