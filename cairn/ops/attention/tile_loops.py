"""AMX loops of attention in bfloat16: 16 queries at once over the slots of a page.

Queries are the columns of the product: then keys are multiplied in the cache's layout, the softmax
needs no shuffles, and its weights are already the columns of the second product.
"""

from __future__ import annotations

import math

import numpy as np

from cairn.ops.cpu import jit, narrow, prange
from cairn.ops.cpu.amx import load_shapes, save_shapes, tile_dot, tile_load, tile_store, tile_zero
from cairn.ops.cpu.avx512 import (
    LOG2_E,
    choose,
    exp2,
    highest,
    load,
    scratch,
    spread,
    store,
    store_pairs,
)

BLOCK = 64
"""Most tokens per block; the values of a page are transposed once per block."""
LEAST = np.float32(-3e38)


@jit
def multiply(matrix, at, lines, depth, columns, out):
    """out [lines, 16] float32 = the matrix [lines, depth] times the columns [depth, 16].

    Args:
        matrix: bfloat16 as uint16, any shape; at: the flat place of its first number.
        lines, depth: whole multiples of 64 and 32.
        columns: [depth / 2, 16], pairs of bfloat16 as float32.
    """
    step = 16 * depth
    for line in range(0, lines, 64):
        first = at + line * depth
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
        for i in range(0, depth, 32):
            tile_load(4, columns, i * 8, 16)
            tile_load(5, matrix, first + i, depth)
            tile_dot(0, 5, 4)
            tile_load(6, matrix, first + step + i, depth)
            tile_dot(1, 6, 4)
            tile_load(5, matrix, first + 2 * step + i, depth)
            tile_dot(2, 5, 4)
            tile_load(6, matrix, first + 3 * step + i, depth)
            tile_dot(3, 6, 4)
        tile_store(0, out, line * 16, 16)
        tile_store(1, out, line * 16 + 256, 16)
        tile_store(2, out, line * 16 + 512, 16)
        tile_store(3, out, line * 16 + 768, 16)


@jit
def transpose(page, first, last, out):
    """out [d, S] = page [S, d] of bfloat16, but zeros for slots outside of first .. last."""
    pairs = out.view(np.uint32)
    for n in range(0, page.shape[0], 2):
        if first <= n and n + 1 <= last:
            even, odd = page[n], page[n + 1]
            for i in range(page.shape[1]):
                pairs[i, n // 2] = np.uint32(even[i]) | np.uint32(odd[i]) << np.uint32(16)
        else:
            for i in range(page.shape[1]):
                out[i, n] = page[n, i] if first <= n <= last else np.uint16(0)
                out[i, n + 1] = page[n + 1, i] if first <= n + 1 <= last else np.uint16(0)


@jit
def take_columns(q, token, first_head, group, columns, place):
    """Heads first_head .. + group - 1 of a token of q to the columns from `place` on.

    Args:
        q: [T, h_q, d / 2], pairs of bfloat16 as float32; columns: [d / 2, 16 or more].
    """
    for h in range(group):
        head = q[token, first_head + h]
        for i in range(len(head)):
            columns[i, place + h] = head[i]


@jit
def largest(logits, size, top):
    """Of lanes `top` and all lines of logits [size, 16]."""
    a, b, c = top, load(logits, 0), load(logits, 16)
    d = load(logits, 32)
    # Four independent sums: none waits for the one before.
    for n in range(0, size, 4):
        a = highest(load(logits, n * 16), a)
        b = highest(load(logits, n * 16 + 16), b)
        c = highest(load(logits, n * 16 + 32), c)
        d = highest(load(logits, n * 16 + 48), d)
    return highest(highest(a, b), highest(c, d))


@jit
def exponents(logits, size, factor, less, shares):
    """shares [size / 2, 16], pairs, = 2 ** (factor logits - less); the sum of each column."""
    factors = spread(factor)
    a = b = spread(np.float32(0))
    for n in range(0, size, 2):
        even = exp2(load(logits, n * 16) * factors - less)
        odd = exp2(load(logits, n * 16 + 16) * factors - less)
        store_pairs(shares, n * 8, even, odd)
        a, b = a + even, b + odd
    return a + b


@jit(threads=True)
def attend_blocks(q, k_cache, v_cache, row, slot, page_table, blocks, rule, scale, config, o, lse):
    """window_attention, with one thread per KV head and block of tokens.

    Args:
        q: [T, h_q, d / 2], pairs of bfloat16 as float32; k_cache, v_cache: [pages, h_kv, S, d].
        row, slot: [T] int64; page_table: [rows, max_pages] int32.
        blocks: [n + 1] int64, the tokens each begins with: neighbouring slots of one row.
        rule: window, aligned, mask_landmarks.
        config: amx.shapes().
        o: [T, h_q, d]; lse: [T, h_q] float32; written.
    """
    heads = k_cache.shape[1]
    for task in prange((len(blocks) - 1) * heads):
        block, head = task // heads, task % heads
        begin, end = blocks[block], blocks[block + 1]
        before = np.empty(64, np.uint8)
        save_shapes(before)
        load_shapes(config)
        _attend_block(
            q, k_cache, v_cache, slot, page_table[row[begin]], begin, end, head, rule, scale, o, lse
        )  # fmt: skip
        load_shapes(before)


@jit
def _attend_block(q, k_cache, v_cache, slot, pages, begin, end, head, rule, scale, o, lse):
    _, heads, size, dim = k_cache.shape
    group = q.shape[1] // heads
    slots, masked = slot[begin:end], rule[2]
    columns, seen = _columns(q, slots, begin, head, group, size, rule)

    groups = len(columns)
    out, masses, tops = scratch(groups * dim), scratch(groups), scratch(groups)
    out[:], masses[:], tops[:] = 0, 0, -np.inf
    values = scratch(dim * size // 32).view(np.uint16).reshape(dim, size)
    logits, shares, part = scratch(size), scratch(size // 2), scratch(dim)
    bounds = scratch(2)
    first, last = seen[0, 0, 0], slots[-1]
    final = size - 2 if masked else size - 1
    for page in range(first // size, last // size + 1):
        start = page * size
        physical = pages[page]
        transpose(v_cache[physical, head], first - start, min(last - start, final), values)
        keys = (physical * heads + head) * size * dim
        for n in range(groups):
            if seen[0, n, 0] >= start + size or seen[1, n, 15] < start:
                continue
            multiply(k_cache, keys, size, dim, columns[n], logits)
            if masked:
                store(logits, (size - 1) * 16, spread(np.float32(-np.inf)))
            if seen[0, n, 15] > start or seen[1, n, 0] < start + final:
                for i in range(16):
                    bounds[0, i], bounds[1, i] = seen[0, n, i] - start, seen[1, n, i] - start
                _hide(logits, size, bounds)
            _add_page(logits, size, scale, values, shares, part, tops, masses, out, n)
    _write(out, tops, masses, begin, len(slots), head * group, group, scale, o, lse)


@jit
def _columns(q, slots, begin, head, group, size, rule):
    """A block's queries in groups of sixteen columns, whole tokens each.

    Returns:
        columns [n, d / 2, 16]; seen [2, n, 16] int64, each column's first and last slot. Empty
        columns see what their group's last token does.
    """
    per = 16 // group
    window, aligned, _ = rule
    groups = (len(slots) + per - 1) // per
    columns = scratch(groups * q.shape[2]).reshape(groups, q.shape[2], 16)
    columns[:] = 0
    seen = np.empty((2, groups, 16), np.int64)
    for n in range(groups):
        for i in range(16):
            token = min(n * per + i // group, n * per + per - 1, len(slots) - 1)
            first = max(slots[token] - (window - 1), 0)
            seen[0, n, i] = first // size * size if aligned else first
            seen[1, n, i] = slots[token]
        for i in range(min(per, len(slots) - n * per)):
            take_columns(q, begin + n * per + i, head * group, group, columns[n], i * group)
    return columns, seen


@jit
def _hide(logits, size, bounds):
    """-inf in the slots of a page outside each column's first and last, of bounds [2, 16]."""
    first, last = load(bounds, 0), load(bounds, 16)
    nothing = spread(np.float32(-np.inf))
    for n in range(size):
        at = spread(np.float32(n))
        kept = choose(at, first, load(logits, n * 16), nothing)
        store(logits, n * 16, choose(last, at, kept, nothing))


@jit
def _add_page(logits, size, scale, values, shares, part, tops, masses, out, n):
    """Add a page to what group n has: largest logits, sums of exponents, and weighted values."""
    dim, factor = len(values), scale * LOG2_E
    before = load(tops, n * 16)
    top = largest(logits, size, before)
    store(tops, n * 16, top)
    # `level` is 0 in columns that have seen no key yet: their weights stay 0 instead of NaN.
    level = choose(top, spread(LEAST), top, spread(np.float32(0)))
    total = exponents(logits, size, factor, level * spread(factor), shares)
    kept = exp2((before - level) * spread(factor))
    store(masses, n * 16, load(masses, n * 16) * kept + total)
    multiply(values, 0, dim, size, shares, part)
    for x in range(dim):
        at = (n * dim + x) * 16
        store(out, at, load(out, at) * kept + load(part, x * 16))


@jit
def _write(out, tops, masses, begin, tokens, first_head, group, scale, o, lse):
    """What the columns of a block have, divided by their masses, to the tokens from `begin` on."""
    per = 16 // group
    for n in range(tokens):
        for h in range(group):
            at, column = n // per, n % per * group + h
            mass = masses[at, column]
            share, mass_of = np.float32(0), np.float32(-np.inf)
            if mass != 0:
                share = np.float32(1) / mass
                mass_of = tops[at, column] * scale + np.float32(math.log(mass))
            lse[begin + n, first_head + h] = mass_of
            result = o[begin + n, first_head + h]
            for i in range(len(result)):
                result[i] = narrow(out[at * len(result) + i, column] * share, result[i])
