"""Kernels of select_pages.

Few tokens: `score_kernel` stores u of every candidate with partial normalisers, in one pass over
the summaries. Many tokens: `normaliser_kernel` sums up every head's candidates and `group_kernel`
computes the dots again to store the groups' best scores alone. Then `best_kernel` keeps the best
of each block of candidates, by a search for the k-th largest value bit by bit, without a sort;
`final_kernel` merges the blocks' winners. Winners come out in the order of their pages, and of
equal ones the first are kept.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def ordered(value):
    """float32 as uint32 of the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def kth_largest(key, count):
    """The count-th largest of uint32 keys [N], N < 2^20: two bits a pass, its three counts in one
    sum."""
    found = tl.full([], 0, tl.uint32)
    for i in tl.static_range(16):
        step = tl.full([], 1 << (30 - 2 * i), tl.uint32)
        one = found + step
        two = one + step
        three = two + step
        counts = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 20)
        counts = tl.sum(counts + ((key >= three).to(tl.int64) << 40), 0)
        enough_one = (counts & 0xFFFFF) >= count
        enough_two = ((counts >> 20) & 0xFFFFF) >= count
        enough_three = (counts >> 40) >= count
        found = tl.where(enough_one, one, found)
        found = tl.where(enough_two, two, found)
        found = tl.where(enough_three, three, found)
    return found


@triton.jit
def largest(value, count):
    """Which of value [N] float32 are among the `count` largest (of equal ones the first), and
    their places 0 .. count - 1 in order of position."""
    key = ordered(value)
    threshold = kth_largest(key, count)
    above = key > threshold
    level = key == threshold
    missing = count - tl.sum(above.to(tl.int32), 0)
    taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= missing))
    return taken, tl.cumsum(taken.to(tl.int32), 0) - 1


@triton.jit
def score_kernel(
    lmk_q, key, bias, slot, row, page_table, u, part_best, part_sum,
    offset, size, scale, table_stride, page_stride, head_stride, pages, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    DP: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """u [T, HEADS, pages] of one token's candidates for the heads of one KV head; per block of
    them its maximum and sum of exponentials, [T, HEADS, blocks]."""
    group: tl.constexpr = HEADS // KV_HEADS
    shared: tl.constexpr = HEADS // KEY_HEADS
    kv = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    candidates = tl.maximum(tl.load(slot + token).to(tl.int32) - offset, 0) // size
    table = page_table + tl.load(row + token) * table_stride
    d = tl.arange(0, DP)
    for block in range(tl.program_id(0), (candidates + BLOCK - 1) // BLOCK, tl.num_programs(0)):
        c = block * BLOCK + tl.arange(0, BLOCK)
        inside = c < candidates
        page = tl.load(table + c, mask=inside, other=0).to(tl.int64)
        whole = inside[:, None] & (d < DIM)[None, :]
        for g in tl.static_range(group):
            head = kv * group + g
            if g % shared == 0:
                at = key + page * page_stride + (head // shared) * head_stride
                summary = tl.load(at[:, None] + d[None, :], mask=whole, other=0.0).to(tl.float32)
            query = tl.load(lmk_q + (token * HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
            value = tl.sum(summary * (query.to(tl.float32) * scale)[None, :], 1)
            if BIAS:
                value += tl.load(bias + page * HEADS + head, mask=inside, other=0.0)
            tl.store(u + (token * HEADS + head) * pages + c, value, mask=inside)
            value = tl.where(inside, value, float("-inf"))
            best = tl.max(value, 0)
            place = (token * HEADS + head) * blocks + block
            tl.store(part_best + place, best)
            tl.store(part_sum + place, tl.sum(tl.exp(value - best), 0))


@triton.jit
def tile_scores(query, table, key, bias, c, inside, head, page_stride, head_stride, scale,
                HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
                BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """u [M, BLOCK] of query [M, DP] with candidates c of one row, for one head."""
    page = tl.load(table + c, mask=inside, other=0).to(tl.int64)
    d = tl.arange(0, DP)
    at = key + page * page_stride + (head // (HEADS // KEY_HEADS)) * head_stride
    summary = tl.load(
        at[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0
    )
    value = tl.dot(query, summary, input_precision=PRECISION) * scale
    if BIAS:
        value += tl.load(bias + page * HEADS + head, mask=inside, other=0.0)[None, :]
    return value


@triton.jit(do_not_specialize=["tokens"])
def normaliser_kernel(
    lmk_q, key, bias, lse, slot, row, page_table, total,
    tokens, offset, size, scale, table_stride, page_stride, head_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total [T, HEADS] = logaddexp(lse, logsumexp over candidates of u) of a tile and a head."""
    head = tl.program_id(1)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    token = begin + tl.arange(0, TOKENS)
    alive = token < tokens
    own_row = tl.load(row + token, mask=alive, other=-1)
    own_slot = tl.load(slot + token, mask=alive, other=0).to(tl.int32)
    candidates = tl.maximum(own_slot - offset, 0) // size
    d = tl.arange(0, DP)
    at = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    query = tl.load(lmk_q + at, mask=alive[:, None] & (d < DIM)[None, :], other=0.0)
    place = token.to(tl.int64) * HEADS + head
    best = tl.load(lse + place, mask=alive, other=0.0)
    summed = tl.where(best == float("-inf"), 0.0, 1.0)
    next_token = begin
    while next_token < tl.minimum(begin + TOKENS, tokens):
        this_row = tl.load(row + next_token)
        mine = alive & (own_row == this_row)
        most = tl.max(tl.where(mine, candidates, 0), 0)
        for start in range(0, most, BLOCK):
            c = start + tl.arange(0, BLOCK)
            value = tile_scores(
                query, page_table + this_row * table_stride, key, bias, c, c < most, head,
                page_stride, head_stride, scale, HEADS, KEY_HEADS, DIM, DP, BIAS, PRECISION,
            )  # fmt: skip
            seen = mine[:, None] & (c[None, :] < candidates[:, None])
            value = tl.where(seen, value, float("-inf"))
            higher = tl.maximum(best, tl.max(value, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            summed = summed * tl.exp(best - base) + tl.sum(tl.exp(value - base[:, None]), 1)
            best = higher
        next_token += tl.sum(mine.to(tl.int32), 0)
    safe = tl.where(summed > 0, summed, 1.0)
    tl.store(total + place, tl.where(summed > 0, best + tl.log(safe), float("-inf")), mask=alive)


@triton.jit(do_not_specialize=["tokens"])
def group_kernel(
    lmk_q, key, bias, total, slot, row, page_table, score,
    tokens, offset, size, scale, table_stride, page_stride, head_stride, pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    DP: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, NORMALISED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """score [T, KV_HEADS, pages]: best of the group's heads, each less its normaliser."""
    group: tl.constexpr = HEADS // KV_HEADS
    kv = tl.program_id(1)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    token = begin + tl.arange(0, TOKENS)
    alive = token < tokens
    own_row = tl.load(row + token, mask=alive, other=-1)
    own_slot = tl.load(slot + token, mask=alive, other=0).to(tl.int32)
    candidates = tl.maximum(own_slot - offset, 0) // size
    d = tl.arange(0, DP)
    next_token = begin
    while next_token < tl.minimum(begin + TOKENS, tokens):
        this_row = tl.load(row + next_token)
        mine = alive & (own_row == this_row)
        most = tl.max(tl.where(mine, candidates, 0), 0)
        for start in range(tl.program_id(2) * BLOCK, most, tl.num_programs(2) * BLOCK):
            c = start + tl.arange(0, BLOCK)
            best = tl.full([TOKENS, BLOCK], float("-inf"), tl.float32)
            for g in range(group):
                head = kv * group + g
                place = token.to(tl.int64) * HEADS + head
                query = tl.load(
                    lmk_q + place[:, None] * DIM + d[None, :],
                    mask=alive[:, None] & (d < DIM)[None, :], other=0.0,
                )  # fmt: skip
                value = tile_scores(
                    query, page_table + this_row * table_stride, key, bias, c, c < most, head,
                    page_stride, head_stride, scale, HEADS, KEY_HEADS, DIM, DP, BIAS, PRECISION,
                )  # fmt: skip
                if NORMALISED:
                    value -= tl.load(total + place, mask=alive, other=0.0)[:, None]
                best = tl.maximum(best, value)
            seen = mine[:, None] & (c[None, :] < candidates[:, None])
            line = (token.to(tl.int64) * KV_HEADS + kv) * pages
            tl.store(score + line[:, None] + c[None, :], best, mask=seen)
        next_token += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def best_kernel(
    u, part_best, part_sum, lse, score, slot, win_score, win_page, indices, scores,
    offset, size, pages, blocks, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SPAN: tl.constexpr, FROM_U: tl.constexpr, NORMALISED: tl.constexpr, FINAL: tl.constexpr,
    SCORED: tl.constexpr,
):  # fmt: skip
    """The topk best of one span of candidates: to win_* [T, KV_HEADS, spans, topk], or FINAL: to
    the op's results, whose scores come from u or are u themselves."""
    group: tl.constexpr = HEADS // KV_HEADS
    span = tl.program_id(0)
    kv = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    candidates = tl.maximum(tl.load(slot + token).to(tl.int32) - offset, 0) // size
    c = span * SPAN + tl.arange(0, SPAN)
    inside = c < candidates
    place = token * KV_HEADS + kv
    if FROM_U:
        value = tl.full([SPAN], float("-inf"), tl.float32)
        if span * SPAN < candidates:
            b = tl.arange(0, BLOCKS)
            # Blocks that no candidate reaches were not written.
            reached = b < (candidates + BLOCK - 1) // BLOCK
            for g in tl.static_range(group):
                head = token * HEADS + kv * group + g
                own = tl.load(u + head * pages + c, mask=inside, other=float("-inf"))
                if NORMALISED:
                    tops = tl.load(part_best + head * blocks + b, mask=reached, other=float("-inf"))
                    sums = tl.load(part_sum + head * blocks + b, mask=reached, other=0.0)
                    window = tl.load(lse + head)
                    base = tl.maximum(tl.max(tops, 0), window)
                    total = tl.sum(sums * tl.exp(tops - base), 0) + tl.exp(window - base)
                    own -= base + tl.log(total)
                value = tl.maximum(value, own)
    else:
        value = tl.load(score + place * pages + c, mask=inside, other=float("-inf"))
    value = tl.where(inside, value, float("-inf"))
    taken, order = largest(value, topk)
    if FINAL:
        tl.store(indices + place * topk + order, tl.where(inside, c, -1), mask=taken)
        if SCORED:
            for g in tl.static_range(group):
                head = token * HEADS + kv * group + g
                own = tl.load(u + head * pages + c, mask=inside & taken, other=float("-inf"))
                tl.store(scores + head * topk + order, own, mask=taken)
    else:
        at = (place * tl.num_programs(0) + span) * topk + order
        tl.store(win_score + at, value, mask=taken)
        tl.store(win_page + at, tl.where(inside, c, -1), mask=taken)


@triton.jit
def final_kernel(
    u, win_score, win_page, indices, scores, pages, winners, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WINNERS: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """The topk best of all spans' winners, of one token and KV head."""
    group: tl.constexpr = HEADS // KV_HEADS
    kv = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    place = token * KV_HEADS + kv
    i = tl.arange(0, WINNERS)
    value = tl.load(win_score + place * winners + i, mask=i < winners, other=float("-inf"))
    page = tl.load(win_page + place * winners + i, mask=i < winners, other=-1)
    value = tl.where(page >= 0, value, float("-inf"))
    taken, order = largest(value, topk)
    tl.store(indices + place * topk + order, page, mask=taken)
    if SCORED:
        for g in tl.static_range(group):
            head = token * HEADS + kv * group + g
            own = tl.load(u + head * pages + page, mask=taken & (page >= 0), other=float("-inf"))
            tl.store(scores + head * topk + order, own, mask=taken)


@triton.jit
def rescore_kernel(
    lmk_q, key, bias, row, page_table, indices, scores,
    scale, table_stride, page_stride, head_stride, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    DP: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """scores [T, HEADS, topk]: u of the selected pages, -inf where there is none."""
    group: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K)
    d = tl.arange(0, DP)
    place = token * KV_HEADS + head // group
    logical = tl.load(indices + place * topk + k, mask=k < topk, other=-1)
    found = logical >= 0
    table = page_table + tl.load(row + token) * table_stride
    page = tl.load(table + logical, mask=found, other=0).to(tl.int64)
    at = key + page * page_stride + (head // (HEADS // KEY_HEADS)) * head_stride
    summary = tl.load(at[:, None] + d[None, :], mask=found[:, None] & (d < DIM)[None, :], other=0.0)
    query = tl.load(lmk_q + (token * HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
    value = tl.sum(summary.to(tl.float32) * (query.to(tl.float32) * scale)[None, :], 1)
    if BIAS:
        value += tl.load(bias + page * HEADS + head, mask=found, other=0.0)
    value = tl.where(found, value, float("-inf"))
    tl.store(scores + (token * HEADS + head) * topk + k, value, mask=k < topk)
