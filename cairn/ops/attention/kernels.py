"""Kernels of dense and window attention over the paged cache.

Query rows of a tile are (token, head of the group) pairs of one KV head: row m is token m // GP,
head m % GP, with the group size G padded to the power of two GP. Products of float32 operands are
IEEE; the weights of a softmax are rounded to the values' dtype before they meet the values.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def first_visible(slot, window, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """First slot that a token at `slot` sees; a window of 0 is no window."""
    first = tl.maximum(slot - window + 1, 0)
    if ALIGNED:
        first = first // SIZE * SIZE
    return tl.where(window == 0, 0, first)


@triton.jit
def attend_block(
    query, best, total, acc, visible, key_at, value_at, scale, inside, PRECISION: tl.constexpr
):
    """One step of the online softmax.

    Args:
        query: [M, D]; best, total: [M] running maximum (base 2) and sum; acc: [M, D].
        visible: [M, N]; key_at: [D, N] and value_at: [N, D] addresses; inside: [N] written keys.
        scale: of the dot products, times log2(e).
    """
    key = tl.load(key_at, mask=inside[None, :], other=0.0)
    logits = tl.dot(query, key, input_precision=PRECISION) * scale
    logits = tl.where(visible, logits, float("-inf"))
    higher = tl.maximum(best, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(logits - base[:, None])
    decay = tl.exp2(best - base)
    value = tl.load(value_at, mask=inside[:, None], other=0.0)
    acc = acc * decay[:, None]
    acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
    return higher, total * decay + tl.sum(weight, 1), acc


@triton.jit(do_not_specialize=["tokens"])
def tile_kernel(
    q, k_cache, v_cache, row, slot, page_table, o, lse,
    tokens, window, scale, table_stride, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of consecutive tokens and one KV head; the tokens of each row in turn."""
    group: tl.constexpr = HEADS // KV_HEADS
    kv = tl.program_id(1)
    # Late tiles see the most keys: they start first.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    m = tl.arange(0, TOKENS * GP)
    d = tl.arange(0, DP)
    token = begin + m // GP
    head = kv * group + m % GP
    alive = (token < tokens) & (m % GP < group)
    own_row = tl.load(row + token, mask=alive, other=-1)
    own_slot = tl.load(slot + token, mask=alive, other=-1).to(tl.int32)
    first = first_visible(own_slot, window, SIZE, ALIGNED)
    at = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    query = tl.load(q + at, mask=alive[:, None] & (d < DIM)[None, :], other=0.0)
    best = tl.full([TOKENS * GP], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * GP], tl.float32)
    acc = tl.zeros([TOKENS * GP, DP], tl.float32)
    factor = scale * 1.4426950408889634
    n = tl.arange(0, KEYS)
    next_token = begin
    while next_token < tl.minimum(begin + TOKENS, tokens):
        this_row = tl.load(row + next_token)
        mine = alive & (own_row == this_row)
        low = tl.min(tl.where(mine, first, 2147483647), 0)
        high = tl.max(tl.where(mine, own_slot, -1), 0)
        table = page_table + this_row * table_stride
        for start in range(low // KEYS * KEYS, high + 1, KEYS):
            t = start + n
            inside = (t >= low) & (t <= high)
            page = tl.load(table + t // SIZE, mask=inside, other=0).to(tl.int64)
            line = page * page_stride + kv * head_stride + (t % SIZE) * DIM
            if MASKED:
                inside = inside & (t % SIZE != SIZE - 1)
            visible = mine[:, None] & (t[None, :] <= own_slot[:, None])
            visible = visible & (t[None, :] >= first[:, None]) & inside[None, :]
            if DP != DIM:
                # Columns beyond the head's width repeat the last one; the query is 0 there.
                column = tl.minimum(d, DIM - 1)
            else:
                column = d
            best, total, acc = attend_block(
                query, best, total, acc, visible,
                k_cache + line[None, :] + column[:, None],
                v_cache + line[:, None] + column[None, :],
                factor, inside, PRECISION,
            )  # fmt: skip
        next_token += tl.sum((mine & (m % GP == 0)).to(tl.int32), 0)
    seen = total > 0
    result = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(o + at, result, mask=alive[:, None] & (d < DIM)[None, :])
    value = (best + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453
    value = tl.where(seen, value, float("-inf"))
    tl.store(lse + token.to(tl.int64) * HEADS + head, value, mask=alive)


@triton.jit
def split_kernel(
    q, k_cache, v_cache, row, slot, page_table, o, lse,
    window, scale, table_stride, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One token, one KV head and one of the splits of its keys.

    o: [T, HEADS, splits, DIM] and lse: [T, HEADS, splits] float32, natural logarithm.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    token = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    m = tl.arange(0, GP)
    d = tl.arange(0, DP)
    head = kv * group + m
    alive = m < group
    this_slot = tl.load(slot + token).to(tl.int32)
    low = first_visible(this_slot, window, SIZE, ALIGNED)
    blocks = this_slot // KEYS - low // KEYS + 1
    each = (blocks + splits - 1) // splits
    begin = (low // KEYS + split * each) * KEYS
    end = tl.minimum(begin + each * KEYS, this_slot + 1)
    at = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    query = tl.load(q + at, mask=alive[:, None] & (d < DIM)[None, :], other=0.0)
    best = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    table = page_table + tl.load(row + token) * table_stride
    column = tl.minimum(d, DIM - 1)
    n = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        t = start + n
        inside = (t >= low) & (t <= this_slot)
        page = tl.load(table + t // SIZE, mask=inside, other=0).to(tl.int64)
        line = page * page_stride + kv * head_stride + (t % SIZE) * DIM
        if MASKED:
            inside = inside & (t % SIZE != SIZE - 1)
        best, total, acc = attend_block(
            query, best, total, acc, alive[:, None] & inside[None, :],
            k_cache + line[None, :] + column[:, None],
            v_cache + line[:, None] + column[None, :],
            scale * 1.4426950408889634, inside, PRECISION,
        )  # fmt: skip
    seen = total > 0
    place = (token.to(tl.int64) * HEADS + head) * splits + split
    result = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(
        o + place[:, None] * DIM + d[None, :], result, mask=alive[:, None] & (d < DIM)[None, :]
    )
    value = (best + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453
    tl.store(lse + place, tl.where(seen, value, float("-inf")), mask=alive)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_o, part_lse, o, lse, splits, DIM: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr
):
    """Merge the splits of one (token, head): attention states weighed by their lse."""
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    inside = s < splits
    logs = tl.load(part_lse + place * splits + s, mask=inside, other=float("-inf"))
    best = tl.max(logs, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp(logs - base)
    total = tl.sum(weight, 0)
    safe = tl.where(total > 0, total, 1.0)
    at = (place * splits + s)[:, None] * DIM + d[None, :]
    part = tl.load(part_o + at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    tl.store(o + place * DIM + d, tl.sum(part * weight[:, None], 0) / safe, mask=d < DIM)
    value = tl.where(total > 0, base + tl.log(safe), float("-inf"))
    tl.store(lse + place, value)
