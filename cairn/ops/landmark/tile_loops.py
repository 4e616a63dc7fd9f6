"""Selected pages in bfloat16 by AMX: every page with the tokens of a block that select it."""

from __future__ import annotations

import numpy as np

from cairn.ops.amx import load_shapes, save_shapes
from cairn.ops.attention.tile_loops import (
    LEAST,
    LOG2_E,
    exponents,
    largest,
    multiply,
    take_columns,
    transpose,
)
from cairn.ops.cpu import jit, prange
from cairn.ops.lanes import load, load_some, scratch, spread, store, store_some


@jit(threads=True)
def attend_pages(
    q, k_cache, v_cache, row, page_table, indices, weights, scale, block, config, out
):  # fmt: skip
    """page_attention, a thread a KV head and block of tokens.

    Args:
        q: [T, h_q, d / 2], pairs of bfloat16 as float32; k_cache, v_cache: [pages, h_kv, S, d].
        row: [T] int64; page_table: [rows, max_pages] int32.
        indices: [T, h_kv, K] int32; weights: [T, h_q, K] float32.
        block: tokens.
        config: amx.shapes().
        out: [T, h_q, d] float32, written.
    """
    tokens, heads = indices.shape[:2]
    blocks = (tokens + block - 1) // block
    for task in prange(heads * blocks):
        head, begin = task // blocks, task % blocks * block
        before = np.empty(64, np.uint8)
        save_shapes(before)
        load_shapes(config)
        _attend_block(
            q, k_cache, v_cache, row, page_table, indices, weights, scale, head, begin,
            min(begin + block, tokens), out,
        )  # fmt: skip
        load_shapes(before)


@jit
def _attend_block(
    q, k_cache, v_cache, row, page_table, indices, weights, scale, head, begin, end, out
):  # fmt: skip
    pages, heads, size, dim = k_cache.shape
    group = q.shape[1] // heads
    first_head, half = head * group, dim // 2
    starts, asked = _by_page(pages, row, page_table, indices, head, begin, end)

    # Every token's queries as columns, once for all its pages.
    queries = np.empty((end - begin, half, group), np.float32)
    for token in range(begin, end):
        take_columns(q, token, first_head, group, queries[token - begin], 0)
    # Of the sixteen lanes of each sum the first `group` count.
    sums = scratch((end - begin) * dim)
    sums[:] = 0

    values = scratch(dim * size // 32).view(np.uint16).reshape(dim, size)
    columns, logits, shares = scratch(half), scratch(size), scratch(size // 2)
    # Sixteen lanes from a place inside of the last line reach into one more.
    part, weight = scratch(dim + 1), scratch(2)
    columns[:], part[:], weight[:] = 0, 0, 0
    per = 16 // group
    nothing = spread(np.float32(-np.inf))
    factor = scale * LOG2_E
    for page in range(pages):
        if starts[page] == starts[page + 1]:
            continue
        transpose(v_cache[page, head], 0, size - 2, values)
        keys = (page * heads + head) * size * dim
        for some in range(starts[page], starts[page + 1], per):
            count = min(per, starts[page + 1] - some)
            for n in range(count):
                token, place = asked[some + n]
                _copy(queries, token - begin, columns, n)
                for h in range(group):
                    weight[0, n * group + h] = weights[token, first_head + h, place]
            multiply(k_cache, keys, size, dim, columns, logits)
            store(logits, (size - 1) * 16, nothing)
            top = largest(logits, size, spread(LEAST))
            total = exponents(logits, size, factor, top * spread(factor), shares)
            multiply(values, 0, dim, size, shares, part)
            store(weight, 0, load(weight, 0) / total)
            for n in range(count):
                given = load(weight, n * group)
                to = (asked[some + n, 0] - begin) * dim * 16
                for i in range(0, dim * 16, 16):
                    more = load(part, i + n * group) * given
                    store(sums, to + i, load(sums, to + i) + more)
    for token in range(begin, end):
        for h in range(group):
            result = out[token, first_head + h]
            for i in range(dim):
                result[i] = sums[(token - begin) * dim + i, h]


@jit
def _copy(queries, token, columns, n):
    """queries [n, d / 2, G] of a token become the n-th G of the columns [d / 2, 16]."""
    half, group = queries.shape[1:]
    for i in range(half):
        taken = load_some(queries, (token * half + i) * group, group)
        store_some(columns, i * 16 + n * group, group, taken)


@jit
def _by_page(pages, row, page_table, indices, head, begin, end):
    """Who asks for each physical page, in order.

    Returns:
        starts [pages + 1] int64: a page's part of the requests [n, 2] int64, (token, place).
    """
    topk = indices.shape[2]
    starts = np.zeros(pages + 2, np.int64)
    for token in range(begin, end):
        for place in range(topk):
            if indices[token, head, place] >= 0:
                starts[page_table[row[token], indices[token, head, place]] + 2] += 1
    for page in range(pages):
        starts[page + 2] += starts[page + 1]
    asked = np.empty((starts[pages + 1], 2), np.int64)
    for token in range(begin, end):
        for place in range(topk):
            if indices[token, head, place] >= 0:
                page = page_table[row[token], indices[token, head, place]]
                asked[starts[page + 1], 0], asked[starts[page + 1], 1] = token, place
                starts[page + 1] += 1
    return starts, asked
