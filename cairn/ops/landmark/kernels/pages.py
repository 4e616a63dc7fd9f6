"""Kernels of page_attention: attention inside each selected page, multiplied by the page's weight.

Few tokens: `pages_kernel` processes a few pages of one token and KV head. Many tokens share pages,
so their (token, selected page) pairs are sorted by page (counting sort): `count_kernel` counts and
numbers the pairs of every page, `place_kernel` assigns every page a range of the sorted pairs, and
`order_kernel` sorts the pairs and cuts them into units of work. `unit_kernel` then keeps a page in
shared memory for all of its tokens, and `reduce_kernel` sums the pages of every token.

Pages of all KV heads are numbered as lines: line = KV head * pages + physical page. A pair is an
entry of `indices` [T, KV_HEADS, topk]. The positions of pages and pairs in the sorted order depend
on the order in which programs run; the result of a pair and the order of the sums do not.
"""

from __future__ import annotations

from cairn.ops.attention.kernels import load_keys, load_rows, load_values, store_rows
from cairn.ops.cache.kernels import slot_start
from cairn.ops.gpu import tl, triton
from cairn.ops.grid_barrier import arrive
from cairn.ops.pdl import await_previous


@triton.jit
def page_output(
    query, k_head, v_head, line, there, factor,
    DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(weighted values [M, DP], sum of the weights [M]) of query [M, DP] in the page at `line`;
    for missing pages the results are undefined. Loads evict first, because a token reads a page
    once."""
    t = tl.arange(0, KEYS)
    inside = t < SIZE - 1
    shown = inside & there
    at = line + slot_start(k_head, t, DIM)
    key = load_keys(k_head, at, t, shown, query.dtype, DIM, SIZE, DP, True)
    value = load_values(v_head, at, t, shown, query.dtype, DIM, SIZE, DP, True)
    logits = tl.dot(query, key, input_precision=PRECISION) * factor
    logits = tl.where(inside[None, :], logits, float("-inf"))
    p = tl.exp2(logits - tl.max(logits, 1)[:, None])
    return tl.dot(p.to(value.dtype), value, input_precision=PRECISION), tl.sum(p, 1)


@triton.jit
def sum_line(
    parts, o, splits, token, kv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GP: tl.constexpr,
    DP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Write o [T, HEADS, DIM] of one token and KV head: the sum of its splits, parts [T, HEADS,
    splits, DIM], stored by programs of the same launch. AHEAD of them are loaded at a time."""
    group: tl.constexpr = HEADS // KV_HEADS
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    shown = (g < group)[:, None] & (d < DIM)[None, :]
    head = token * HEADS + kv * group + g
    acc = tl.zeros([GP, DP], tl.float32)
    for begin in range(0, splits, AHEAD):
        for n in tl.static_range(AHEAD):
            at = parts + ((head * splits + begin + n) * DIM)[:, None] + d[None, :]
            acc += tl.load(at, mask=shown & (begin + n < splits), other=0.0, cache_modifier=".cg")
    tl.store(o + (head * DIM)[:, None] + d[None, :], acc, mask=shown)


@triton.jit(early=(), do_not_specialize=["each"])
def pages_kernel(
    q, k_cache, v_cache, row, page_table, indices, weights, parts, o, counters,
    scale, table_stride, page_stride, head_stride, topk, each,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    EACH: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend to `each` selected pages of one token and KV head: parts [T, HEADS, splits, DIM]
    float32; the last split to finish writes their sum, o [T, HEADS, DIM] float32.

    Args:
        counters: [T * KV_HEADS, APART], all 0, see `arrivals`; None: one split, parts is o.
        GP, ROWS: heads of the group, padded to a power of two, ROWS >= 16.
        KEYS: slots of a page, padded to a power of two, >= 16.
        EACH: `each`, padded to a power of two.
        AHEAD: as in `sum_line`.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    group: tl.constexpr = HEADS // KV_HEADS
    split = tl.program_id(0)
    kv = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    m = tl.arange(0, ROWS)
    head = token * HEADS + kv * group + m
    alive = m < group
    query = load_rows(q + head * DIM, alive, DIM, DP)
    table = page_table + tl.load(row + token) * table_stride
    line = token * KV_HEADS + kv
    begin = split * each
    end = tl.minimum(begin + each, topk)
    e = tl.arange(0, EACH)
    logical = tl.load(indices + line * topk + begin + e, mask=begin + e < end, other=-1)
    known = tl.load(table + logical, mask=logical >= 0, other=0)
    acc = tl.zeros([ROWS, DP], tl.float32)
    at_head = kv.to(tl.int64) * head_stride
    # Positions after the last selected page are empty.
    for i in range(tl.max(tl.where(logical >= 0, e + 1, 0), 0)):
        page = tl.sum(tl.where(e == i, known, 0), 0).to(tl.int64)
        found = tl.max(tl.where(e == i, logical, -1), 0) >= 0
        weight = tl.load(weights + head * topk + begin + i, mask=alive & found, other=0.0)
        value, summed = page_output(
            query, k_cache + at_head, v_cache + at_head, page * page_stride,
            found, scale * 1.4426950408889634, DIM, SIZE, DP, KEYS, PRECISION,
        )  # fmt: skip
        acc += value * (weight / summed)[:, None]
    splits = tl.num_programs(0)
    store_rows(parts + (head * splits + split) * DIM, acc, alive, DIM, DP)
    if counters is not None:
        counters += line * APART
        if arrive(counters) == splits - 1:
            sum_line(parts, o, splits, token, kv, HEADS, KV_HEADS, DIM, GP, DP, AHEAD)
            tl.store(counters, 0)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    indices, row, page_table, counts, lines, ranks, pairs, pages, table_stride, topk,
    KV_HEADS: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the pairs of every line in the first column of counts [KV_HEADS * pages, APART],
    initially 0; for every pair write its line (-1: no page) and its number within the line."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    logical = tl.load(indices + pair, mask=inside, other=-1)
    found = logical >= 0
    place = pair // topk
    this_row = tl.load(row + place // KV_HEADS, mask=found, other=0)
    page = tl.load(page_table + this_row * table_stride + logical, mask=found, other=0)
    line = tl.where(found, place % KV_HEADS * pages + page, -1)
    rank = tl.atomic_add(counts + line * APART, 1, mask=found, sem="relaxed")
    tl.store(lines + pair, line, mask=inside)
    tl.store(ranks + pair, rank, mask=found)


@triton.jit
def place_kernel(
    counts, cursors, sizes, starts, units, lines,
    MOST: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Assign every line a range of the sorted pairs, and a unit of work per MOST pairs.

    Args:
        counts: [lines, APART]; the first column is the number of pairs of every line.
        cursors: [2], initially 0: pairs and units assigned so far.
        sizes, starts, units: [lines], number of pairs, first pair and first unit of every line.
    """
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = line < lines
    count = tl.load(counts + line * APART, mask=inside, other=0)
    tl.store(sizes + line, count, mask=inside)
    needed = (count + MOST - 1) // MOST
    start = tl.atomic_add(cursors, tl.sum(count, 0), sem="relaxed")
    unit = tl.atomic_add(cursors + 1, tl.sum(needed, 0), sem="relaxed")
    tl.store(starts + line, start + tl.cumsum(count, 0) - count, mask=inside)
    tl.store(units + line, unit + tl.cumsum(needed, 0) - needed, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def order_kernel(
    lines, ranks, sizes, starts, units, places, tokens,
    unit_line, unit_first, unit_pairs, pairs, topk,
    KV_HEADS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sort the pairs by line: write places [pairs], the sorted position of each pair (-1: no page),
    tokens [pairs], the token at each position, and the line and range of every unit."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.load(lines + pair, mask=pair < pairs, other=-1)
    found = line >= 0
    start = tl.load(starts + line, mask=found, other=0)
    rank = tl.load(ranks + pair, mask=found, other=0)
    place = tl.where(found, start + rank, -1)
    tl.store(places + pair, place, mask=pair < pairs)
    tl.store(tokens + place, pair // (topk * KV_HEADS), mask=found)
    # Only the first pair of each unit writes the unit's description.
    heads = found & (rank % MOST == 0)
    unit = tl.load(units + line, mask=heads, other=0) + rank // MOST
    left = tl.load(sizes + line, mask=heads, other=0) - rank
    tl.store(unit_line + unit, line, mask=heads)
    tl.store(unit_first + unit, place, mask=heads)
    tl.store(unit_pairs + unit, tl.minimum(left, MOST), mask=heads)


@triton.jit
def unit_kernel(
    q, k_cache, v_cache, tokens, cursors, unit_line, unit_first, unit_pairs, parts,
    scale, page_stride, head_stride, pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, PAIRS: tl.constexpr,
    POSITIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write parts [pairs, group, DIM], in sorted order: the attention of every pair inside its
    page, PAIRS per iteration. POSITIVE: scale > 0."""
    group: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, PAIRS * GP)
    t = tl.arange(0, KEYS)
    inside = t < SIZE - 1
    factor = scale * 1.4426950408889634
    for unit in range(tl.program_id(0), tl.load(cursors + 1), tl.num_programs(0)):
        line = tl.load(unit_line + unit)
        first = tl.load(unit_first + unit)
        count = tl.load(unit_pairs + unit)
        kv = line // pages
        page = (line % pages).to(tl.int64)
        at = page * page_stride + kv.to(tl.int64) * head_stride + slot_start(k_cache, t, DIM)
        key = load_keys(k_cache, at, t, inside, q.dtype.element_ty, DIM, SIZE, DP)
        value = load_values(v_cache, at, t, inside, q.dtype.element_ty, DIM, SIZE, DP)
        for begin in range(0, count, PAIRS):
            i = begin + m // GP
            alive = (i < count) & (m % GP < group)
            # Past the end, the last pair is repeated, so loads need no mask.
            token = tl.load(tokens + first + tl.minimum(i, count - 1)).to(tl.int64)
            head = token * HEADS + kv * group + tl.minimum(m % GP, group - 1)
            query = load_rows(q + head * DIM, m >= 0, DIM, DP)
            dots = tl.dot(query, key, input_precision=PRECISION)
            if not POSITIVE:
                dots *= factor
            dots = tl.where(inside[None, :], dots, float("-inf"))
            top = tl.max(dots, 1)[:, None]
            # A positive scale keeps the order, so it moves into one fused multiply-subtract.
            p = tl.exp2(dots * factor - top * factor if POSITIVE else dots - top)
            # One division per row: dividing every element costs more than the products.
            share = 1.0 / tl.sum(p, 1)
            acc = tl.dot(p.to(value.dtype), value, input_precision=PRECISION) * share[:, None]
            own = (first + i).to(tl.int64) * group + m % GP
            store_rows(parts + own * DIM, acc, alive, DIM, DP, True)


@triton.jit
def layer_totals(score, window, SOFTMAX1: tl.constexpr):
    """For every row of scores [M, K]: the maximum to subtract (base) [M]; the sum of exponentials
    of the scores, of the window's lse [M] and, with SOFTMAX1, of a zero; and exp(window - base)."""
    base = tl.maximum(tl.max(score, 1), window)
    if SOFTMAX1:
        base = tl.maximum(base, 0.0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = tl.sum(tl.exp(score - base[:, None]), 1) + tl.exp(window - base)
    if SOFTMAX1:
        total += tl.exp(-base)
    return base, tl.where(total > 0, total, 1.0), tl.exp(window - base)


@triton.jit
def load_scores(scores, line, topk, own, K: tl.constexpr):
    """Load the rows `line` [M] of scores [.., topk] as [M, K]; -inf in the padding."""
    k = tl.arange(0, K)
    shown = own[:, None] & (k < topk)[None, :]
    return tl.load(scores + line[:, None] * topk + k[None, :], mask=shown, other=float("-inf"))


@triton.jit
def reduce_kernel(
    parts, places, weights, o, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write o [T, HEADS, DIM]: the weighted sum of a token's pairs, for the heads of one KV head.

    Args:
        places: [T, KV_HEADS, topk], index of each pair in parts; -1: none.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    place = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    own = g < group
    head = place // KV_HEADS * HEADS + place % KV_HEADS * group + g
    acc = tl.zeros([GP, DP], tl.float32)
    for start in range(0, topk, STEP):
        k = start + tl.arange(0, STEP)
        part_of = tl.load(places + place * topk + k, mask=k < topk, other=-1)
        shown = (part_of >= 0)[:, None] & own[None, :]
        weight = tl.load(weights + head[None, :] * topk + k[:, None], mask=shown, other=0.0)
        at = (part_of.to(tl.int64) * group)[:, None] + g[None, :]
        wide = shown[:, :, None]
        if DP != DIM:
            wide = wide & (d < DIM)[None, None, :]
        part = tl.load(parts + at[:, :, None] * DIM + d[None, None, :], mask=wide, other=0.0)
        acc += tl.sum(part.to(tl.float32) * weight[:, :, None], 0)
    store_rows(o + head * DIM, acc, own, DIM, DP)
