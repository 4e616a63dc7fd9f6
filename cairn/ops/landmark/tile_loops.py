"""AMX loops of landmark layers in bfloat16: page scores, and page attention page by page with the
tokens of a block."""

from __future__ import annotations

import numpy as np

from cairn.ops.attention.tile_loops import (
    LEAST,
    exponents,
    largest,
    multiply,
    take_columns,
    transpose,
)
from cairn.ops.cpu import jit, prange
from cairn.ops.cpu.amx import load_shapes, save_shapes
from cairn.ops.cpu.avx512 import LOG2_E, halves, load, load_some, scratch, spread, store, store_some


@jit(threads=True)
def score_pages(z, tokens, keys, bias, scale, config, u):
    """Page scores of tiles, with one thread per key head and group of tokens with 16 queries.

    Args:
        z: [T, h, d / 2], pairs of bfloat16 as float32; tokens: [U, c] int64.
        keys: [U, h_R, P, d], h is a multiple of h_R with at most 16 query heads per key head, and P
            a multiple of 64.
        bias: [U, h, columns] float32, or [0, 0, 0]; columns <= P.
        config: amx.shapes().
        u: [U, h, c, columns] float32, written.
    """
    units, key_heads, pages, dim = keys.shape
    group, width = u.shape[1] // key_heads, u.shape[2]
    each = 16 // group
    blocks = (width + each - 1) // each
    for task in prange(units * key_heads * blocks):
        unit, head, begin = (
            task // (key_heads * blocks), task // blocks % key_heads, task % blocks * each
        )  # fmt: skip
        before = np.empty(64, np.uint8)
        save_shapes(before)
        load_shapes(config)
        columns, product = scratch(dim // 2), scratch(pages)
        columns[:] = 0
        end = min(begin + each, width)
        for n in range(begin, end):
            take_columns(z, tokens[unit, n], head * group, group, columns, (n - begin) * group)
        at = (unit * key_heads + head) * pages * dim
        multiply(keys, at, pages, dim, columns, product)
        load_shapes(before)
        for n in range(begin, end):
            for h in range(group):
                line, column = u[unit, head * group + h, n], (n - begin) * group + h
                for page in range(len(line)):
                    line[page] = product[page, column] * scale
                if bias.size:
                    more = bias[unit, head * group + h]
                    for page in range(len(line)):
                        line[page] += more[page]


@jit(threads=True)
def attend_pages(
    q, k_cache, v_cache, row, page_table, indices, weights, scale, block, config, out
):  # fmt: skip
    """page_attention, with one thread per KV head and block of tokens.

    Args:
        q: [T, h_q, d / 2], pairs of bfloat16 as float32; k_cache, v_cache: [pages, h_kv, S, d].
        row: [T] int64; page_table: [rows, max_pages] int32.
        indices: [T, h_kv, K] int32; weights: [T, h_q, K] float32.
        block: tokens per block.
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
    heads, size, dim = k_cache.shape[1:]
    group, topk = q.shape[1] // heads, indices.shape[2]
    first_head, half = head * group, dim // 2
    lowest, stops, asked = _by_page(row, page_table, indices, head, begin, end)

    # Transpose each token's queries once for all of its pages.
    queries = np.empty((end - begin, half, group), np.float32)
    for token in range(begin, end):
        take_columns(q, token, first_head, group, queries[token - begin], 0)
    given = _by_place(weights, begin, end, first_head, group)
    # A row holds pairs of dimensions of eight heads.
    lines = (group + 7) // 8 * half
    sums = scratch((end - begin) * lines)
    sums[:] = 0

    values = scratch(dim * size // 32).view(np.uint16).reshape(dim, size)
    columns, shares = scratch(half), scratch(size // 2)
    # One element more, because a load of 16 lanes from inside a row reads past its end.
    product, weight = scratch(max(size, dim) + 1), scratch(3)
    columns[:], product[:], weight[:] = 0, 0, 0
    per, stop = 16 // group, 0
    nothing = spread(np.float32(-np.inf))
    factor = scale * LOG2_E
    for n_page in range(len(stops)):
        start, stop, page = stop, stops[n_page], lowest + n_page
        if start == stop:
            continue
        transpose(v_cache[page, head], 0, size - 2, values)
        keys = (page * heads + head) * size * dim
        for some in range(start, stop, per):
            count = min(per, stop - some)
            for n in range(count):
                token, place = asked[some + n, 0] - begin, asked[some + n, 1]
                _copy(queries, token * half, half, group, columns, n * group)
                _copy(given, token * topk + place, 1, group, weight, 16 + n * group)
            multiply(k_cache, keys, size, dim, columns, product)
            store(product, (size - 1) * 16, nothing)
            top = largest(product, size, spread(LEAST))
            total = exponents(product, size, factor, top * spread(factor), shares)
            store(weight, 16, load(weight, 16) / total)
            multiply(values, 0, dim, size, shares, product)
            for n in range(count):
                to = (asked[some + n, 0] - begin) * lines
                _add(product, dim, weight, n * group, group, sums, to)
    for token in range(begin, end):
        for h in range(group):
            result, line = out[token, first_head + h], (token - begin) * lines + h // 8 * half
            for i in range(half):
                result[2 * i] = sums[line + i, h % 8]
                result[2 * i + 1] = sums[line + i, 8 + h % 8]


@jit
def _by_place(weights, begin, end, first_head, group):
    """weights [T, h_q, K] of a head's group in tokens begin .. end - 1: [n, K, G]."""
    given = np.empty((end - begin, weights.shape[2], group), np.float32)
    for token in range(begin, end):
        for h in range(group):
            line = weights[token, first_head + h]
            for place in range(len(line)):
                given[token - begin, place, h] = line[place]
    return given


@jit
def _copy(numbers, line, count, group, columns, at):
    """Copy `count` rows [G] of `numbers` from row `line` on to rows of columns [any, 16] from row
    `at` on."""
    for i in range(count):
        taken = load_some(numbers, (line + i) * group, group)
        store_some(columns, i * 16 + at, group, taken)


@jit
def _add(product, dim, weight, column, group, sums, line):
    """Add G columns of a product [d, 16], each times its weight, to a token's rows of sums.

    Args:
        weight: [3, 16]; the second row has the weight of each column.
    """
    to = line * 16
    for first in range(column, column + group, 8):
        twice = halves(load(weight, 16 + first), load(weight, 8 + first))
        for i in range(0, dim * 16, 32):
            more = halves(load(product, i + first), load(product, i + 8 + first)) * twice
            store(sums, to, load(sums, to) + more)
            to += 16


@jit
def _by_page(row, page_table, indices, head, begin, end):
    """The requests for each physical page, in order.

    Returns:
        The lowest requested page; stops [pages up to the highest] int64, the end of each page's
        range of requests; and the requests [n, 2] int64, (token, position).
    """
    topk = indices.shape[2]
    lowest, highest = np.int64(2**31), np.int64(-1)
    for token in range(begin, end):
        for place in range(topk):
            if indices[token, head, place] >= 0:
                page = np.int64(page_table[row[token], indices[token, head, place]])
                lowest, highest = min(lowest, page), max(highest, page)
    pages = max(highest + 1 - lowest, 0)
    starts = np.zeros(pages + 1, np.int64)
    for token in range(begin, end):
        for place in range(topk):
            if indices[token, head, place] >= 0:
                page = page_table[row[token], indices[token, head, place]] - lowest
                starts[page + 1] += 1
    for page in range(pages):
        starts[page + 1] += starts[page]
    asked = np.empty((starts[pages], 2), np.int64)
    for token in range(begin, end):
        for place in range(topk):
            if indices[token, head, place] >= 0:
                page = page_table[row[token], indices[token, head, place]] - lowest
                asked[starts[page], 0], asked[starts[page], 1] = token, place
                starts[page] += 1
    return lowest, starts[:pages], asked
