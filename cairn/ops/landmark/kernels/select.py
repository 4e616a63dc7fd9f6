"""Kernels of select_pages.

Few tokens: `score_kernel` stores u of every candidate, with the maximum and the summed exponentials
of every block of CB candidates, in one pass over the summaries. Many tokens: `normaliser_kernel`
sums the exponentials of every head's candidates, and `group_kernel` (on Hopper
`group_scores_kernel`) computes the dot products again and stores only the groups' best scores and
the blocks' maxima.

Then the best are selected, see `choose`; with many tokens `rescore_kernel` computes their u.
"""

from __future__ import annotations

from cairn.ops.attention.kernels import load_columns, load_rows
from cairn.ops.gpu import tl, triton


@triton.jit
def candidates_of(slot, token, offset, size):
    """Number of candidate pages of a token: pages 0 .. that number - 1."""
    return tl.maximum(tl.load(slot + token).to(tl.int32) - offset, 0) // size


@triton.jit
def score_kernel(
    lmk_q, key, bias, slot, row, page_table, u, part_best, part_sum,
    offset, size, scale, table_stride, page_stride, head_stride, pages, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, CB: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Write u [T, KV_HEADS, pages, group] of a token's candidates for the heads of one KV head and,
    per block of CB, their maximum and sum of exponentials, [T, KV_HEADS, blocks, group].

    A program processes some of the tiles of TILE candidates of one token and KV head.
    """
    token, kv = tl.program_id(2), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    shared: tl.constexpr = HEADS // KEY_HEADS
    candidates = candidates_of(slot, token, offset, size)
    table = page_table + tl.load(row + token) * table_stride
    d = tl.arange(0, DP)
    g = tl.arange(0, GP)
    head = kv * group + g
    own = g < group
    line = token.to(tl.int64) * KV_HEADS + kv
    query = load_rows(lmk_q + (token.to(tl.int64) * HEADS + head) * DIM, own, DIM, DP)
    query = query.to(tl.float32) * scale
    for tile in range(tl.program_id(0), (candidates + TILE - 1) // TILE, tl.num_programs(0)):
        c = tile * TILE + tl.arange(0, TILE)
        inside = c < candidates
        page = tl.load(table + c, mask=inside, other=0).to(tl.int64)
        shown = inside[:, None] & own[None, :]
        at = key + page[:, None] * page_stride + (head // shared)[None, :] * head_stride
        wide = shown[:, :, None]
        if DP != DIM:
            wide = wide & (d < DIM)[None, None, :]
        summary = tl.load(at[:, :, None] + d[None, None, :], mask=wide, other=0.0)
        value = tl.sum(summary.to(tl.float32) * query[None, :, :], 2)
        if BIAS:
            value += tl.load(bias + page[:, None] * HEADS + head[None, :], mask=shown, other=0.0)
        tl.store(u + (line * pages + c)[:, None] * group + g[None, :], value, mask=shown)
        value = tl.where(shown, value, float("-inf"))
        members = tl.reshape(value, [TILE // CB, CB, GP])
        best = tl.max(members, 1)
        base = tl.where(best == float("-inf"), 0.0, best)
        summed = tl.sum(tl.exp(members - base[:, None, :]), 1)
        block = tile * (TILE // CB) + tl.arange(0, TILE // CB)
        at_block = (line * blocks + block)[:, None] * group + g[None, :]
        kept = (block < blocks)[:, None] & own[None, :]
        tl.store(part_best + at_block, best, mask=kept)
        tl.store(part_sum + at_block, summed, mask=kept)


@triton.jit
def tile_scores(
    query, table, key, bias, c, inside, head, page_stride, head_stride, scale, unit,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """unit * u [M, BLOCK] of query [M, DP] with candidates c of one row, for one head."""
    page = tl.load(table + c, mask=inside, other=0).to(tl.int64)
    at = key + page * page_stride + (head // (HEADS // KEY_HEADS)) * head_stride
    summary = load_columns(at, inside, DIM, DP)
    value = tl.dot(query, summary, input_precision=PRECISION) * (scale * unit)
    if BIAS:
        value += tl.load(bias + page * HEADS + head, mask=inside, other=0.0)[None, :] * unit
    return value


@triton.jit
def add_blocks(
    best, summed, query, table, key, bias, own, most, begin, end, head,
    page_stride, head_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, EDGE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add candidates begin .. end - 1 to the running maximum (base 2) and sum of every token [M].

    Args:
        own: [M], number of candidates of each token; most: their maximum.
        EDGE: some of them are not candidates of every token.
        STAGES: num_stages of the loop, which then also prefetches loads that do not feed a tl.dot.
    """
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        c = start + tl.arange(0, BLOCK)
        value = tile_scores(
            query, table, key, bias, c, c < most, head, page_stride, head_stride,
            scale, 1.4426950408889634, HEADS, KEY_HEADS, DIM, DP, BIAS, PRECISION,
        )  # fmt: skip
        if EDGE:
            value = tl.where(c[None, :] < own[:, None], value, float("-inf"))
        higher = tl.maximum(best, tl.max(value, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        summed = summed * tl.exp2(best - base) + tl.sum(tl.exp2(value - base[:, None]), 1)
        best = higher
    return best, summed


@triton.jit(do_not_specialize=["tokens"])
def normaliser_kernel(
    lmk_q, key, bias, lse, slot, row, page_table, total,
    tokens, offset, size, scale, table_stride, page_stride, head_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """total [HEADS, T] = logaddexp(lse, logsumexp over candidates of u) of a tile and a head."""
    head = tl.program_id(0)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    token = begin + tl.arange(0, TOKENS)
    alive = token < tokens
    own_row = tl.load(row + token, mask=alive, other=-1)
    own_slot = tl.load(slot + token, mask=alive, other=0).to(tl.int32)
    candidates = tl.maximum(own_slot - offset, 0) // size
    place = token.to(tl.int64) * HEADS + head
    query = load_rows(lmk_q + place * DIM, alive, DIM, DP)
    best = tl.load(lse + place, mask=alive, other=0.0) * 1.4426950408889634
    summed = tl.where(best == float("-inf"), 0.0, 1.0)
    this_row = tl.min(tl.where(alive, own_row, 2147483647), 0)
    while this_row < 2147483647:
        mine = alive & (own_row == this_row)
        own = tl.where(mine, candidates, 0)
        most = tl.max(own, 0)
        # In a tile of one sequence, blocks before `edge` are candidates of every token.
        edge = tl.min(tl.where(alive & (own_row != this_row), 0, own), 0)
        edge = tl.min(tl.where(alive, edge, 2147483647), 0) // BLOCK * BLOCK
        table = page_table + this_row * table_stride
        best, summed = add_blocks(
            best, summed, query, table, key, bias, own, most, 0, edge, head,
            page_stride, head_stride, scale, HEADS, KEY_HEADS, DIM, DP, BLOCK, False, BIAS,
            PRECISION, STAGES,
        )  # fmt: skip
        best, summed = add_blocks(
            best, summed, query, table, key, bias, own, most, edge, most, head,
            page_stride, head_stride, scale, HEADS, KEY_HEADS, DIM, DP, BLOCK, True, BIAS,
            PRECISION, STAGES,
        )  # fmt: skip
        this_row = tl.min(tl.where(alive & (own_row > this_row), own_row, 2147483647), 0)
    safe = tl.where(summed > 0, summed, 1.0)
    value = (best + tl.log2(safe)) * 0.6931471805599453
    at = total + head.to(tl.int64) * tokens + token
    tl.store(at, tl.where(summed > 0, value, float("-inf")), mask=alive)


@triton.jit
def head_scores(
    query, key, total, page, inside, alive, token, total_stride, head, scale, page_stride,
    head_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    NORMALISED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[TOKENS, BLOCK], Scores [TOKENS, BLOCK] of some pages for one head's queries [TOKENS, DP],
    without biases."""
    own_key = key + page * page_stride + head // (HEADS // KEY_HEADS) * head_stride
    summary = load_columns(own_key, inside, DIM, DP)
    value = tl.dot(query, summary, input_precision=PRECISION) * scale
    if NORMALISED:
        normaliser = total + head.to(tl.int64) * total_stride + token
        value -= tl.load(normaliser, mask=alive, other=0.0)[:, None]
    return value


@triton.jit(do_not_specialize=["tokens", "total_stride"])
def group_kernel(
    lmk_q, key, bias, total, slot, row, page_table, score, part_best,
    tokens, total_stride, offset, size, scale, table_stride, page_stride, head_stride,
    pages, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    DP: tl.constexpr, GP: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    CB: tl.constexpr,
    BIAS: tl.constexpr, NORMALISED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write score [T, KV_HEADS, pages]: the maximum over the group's heads of u minus the head's
    normaliser in total [HEADS, T], whose rows are total_stride apart; and the maxima of its blocks
    of CB, part_best [T, KV_HEADS, blocks]."""
    group: tl.constexpr = HEADS // KV_HEADS
    kv = tl.program_id(1)
    begin = (tl.num_programs(2) - 1 - tl.program_id(2)) * TOKENS
    token = begin + tl.arange(0, TOKENS)
    alive = token < tokens
    own_row = tl.load(row + token, mask=alive, other=-1)
    own_slot = tl.load(slot + token, mask=alive, other=0).to(tl.int32)
    candidates = tl.maximum(own_slot - offset, 0) // size
    line = token.to(tl.int64) * KV_HEADS + kv
    of = tl.arange(0, GP)
    lines = lmk_q + (token.to(tl.int64) * HEADS + kv * group) * DIM
    if group == 1:
        # With one head, its queries stay in registers, and the next pages' keys are prefetched
        # instead.
        query = load_rows(lines, alive, DIM, DP)
    this_row = tl.min(tl.where(alive, own_row, 2147483647), 0)
    while this_row < 2147483647:
        mine = alive & (own_row == this_row)
        own = tl.where(mine, candidates, 0)
        most = tl.max(own, 0)
        table = page_table + this_row * table_stride
        for start in range(tl.program_id(0) * BLOCK, most, tl.num_programs(0) * BLOCK):
            c = start + tl.arange(0, BLOCK)
            inside = c < most
            page = tl.load(table + c, mask=inside, other=0).to(tl.int64)
            if BIAS:
                at = page[None, :] * HEADS + (kv * group + of)[:, None]
                biases = tl.load(bias + at, mask=inside[None, :] & (of < group)[:, None], other=0.0)
            if group == 1:
                best = head_scores(
                    query, key, total, page, inside, alive, token, total_stride, kv,
                    scale, page_stride, head_stride,
                    HEADS, KEY_HEADS, DIM, DP, NORMALISED, PRECISION,
                )  # fmt: skip
                if BIAS:
                    best += tl.sum(biases, 0)[None, :]
            else:
                best = tl.full([TOKENS, BLOCK], float("-inf"), tl.float32)
                for g in tl.range(0, group, num_stages=STAGES):
                    value = head_scores(
                        load_rows(lines + g * DIM, alive, DIM, DP), key, total, page, inside,
                        alive, token, total_stride, kv * group + g, scale, page_stride, head_stride,
                        HEADS, KEY_HEADS, DIM, DP, NORMALISED, PRECISION,
                    )  # fmt: skip
                    if BIAS:
                        value += tl.sum(tl.where((of == g)[:, None], biases, 0.0), 0)[None, :]
                    best = tl.maximum(best, value)
            seen = c[None, :] < own[:, None]
            # Columns past a token's candidates may hold any value: mask by whole cache sectors, or
            # the stores would be scalar.
            written = mine[:, None] & (c < pages)[None, :]
            tl.store(score + (line * pages)[:, None] + c[None, :], best, mask=written)
            best = tl.where(seen, best, float("-inf"))
            tops = tl.max(tl.reshape(best, [TOKENS, BLOCK // CB, CB]), 2)
            block = start // CB + tl.arange(0, BLOCK // CB)
            kept = block[None, :] * CB < own[:, None]
            tl.store(part_best + (line * blocks)[:, None] + block[None, :], tops, mask=kept)
        this_row = tl.min(tl.where(alive & (own_row > this_row), own_row, 2147483647), 0)


@triton.jit
def rescore_kernel(
    lmk_q, key, bias, row, page_table, indices, scores,
    scale, table_stride, page_stride, head_stride, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Write scores [T, HEADS, topk]: u of the selected pages, -inf in the padding."""
    group: tl.constexpr = HEADS // KV_HEADS
    # One KV head at a time, so that its summaries may fit into L1.
    token = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    place = token * KV_HEADS + kv
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    own = g < group
    head = kv * group + g
    query = load_rows(lmk_q + (token * HEADS + head) * DIM, own, DIM, DP).to(tl.float32) * scale
    table = page_table + tl.load(row + token) * table_stride
    for start in range(0, topk, STEP):
        k = start + tl.arange(0, STEP)
        logical = tl.load(indices + place * topk + k, mask=k < topk, other=-1)
        found = logical >= 0
        page = tl.load(table + logical, mask=found, other=0).to(tl.int64)
        shown = found[:, None] & own[None, :]
        wide = shown[:, :, None]
        if DP != DIM:
            wide = wide & (d < DIM)[None, None, :]
        at = key + page[:, None] * page_stride
        at += (head // (HEADS // KEY_HEADS))[None, :] * head_stride
        summary = tl.load(at[:, :, None] + d[None, None, :], mask=wide, other=0.0)
        value = tl.sum(summary.to(tl.float32) * query[None, :, :], 2)
        if BIAS:
            value += tl.load(bias + page[:, None] * HEADS + head[None, :], mask=shown, other=0.0)
        value = tl.where(shown, value, float("-inf"))
        at_score = (token * HEADS + head)[None, :] * topk + k[:, None]
        tl.store(scores + at_score, value, mask=(k < topk)[:, None] & own[None, :])
