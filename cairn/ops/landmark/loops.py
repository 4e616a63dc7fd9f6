"""Numba loops of landmark attention for few tokens on the CPU."""

from __future__ import annotations

import math

import numpy as np

from cairn.ops.attention.loops import add_values, attend, exponents, highest, multiply, scaled
from cairn.ops.cpu import bits, exp, jit, narrow, prange, wide


@jit(threads=True)
def attend_tokens(
    q, lmk_q, k_cache, v_cache, keys, key_strides, bias, row, slot, page_table, rule, scales,
    o, indices, scores, lse,
):  # fmt: skip
    """landmark_attention, with one thread per token and KV head.

    Args:
        q, lmk_q: [T, h_q, d]; k_cache, v_cache: [pages, h_kv, S, d].
        keys: summary_key, flattened. key_strides: strides of its pages and heads, and query heads
            per head.
        bias: [pages, h_q] float32, or [0, 0].
        row, slot: [T] int64; page_table: [rows, max_pages] int32.
        rule: window, topk, softmax1, and whether each head's normaliser is subtracted from its
            scores.
        scales: scales of queries and of landmark queries.
        o, indices, scores, lse: the results, written.
    """
    heads = k_cache.shape[1]
    for task in prange(q.shape[0] * heads):
        _attend_head(
            task // heads, task % heads, q, lmk_q, k_cache, v_cache, keys, key_strides, bias,
            page_table[row[task // heads]], slot[task // heads], rule, scales,
            o, indices, scores, lse,
        )  # fmt: skip


@jit
def _attend_head(
    token, head, q, lmk_q, k_cache, v_cache, keys, key_strides, bias, pages, slot, rule, scales,
    o, indices, scores, lse,
):  # fmt: skip
    dim, size = q.shape[2], k_cache.shape[2]
    group = q.shape[1] // k_cache.shape[1]
    first_head = head * group
    window, topk, softmax1, normalised = rule
    first = max(slot - (window - 1), 0) // size * size
    candidates = first // size

    query = scaled(q, token, first_head, group, scales[0])
    logits = np.empty((size, group), np.float32)
    o_window = np.zeros((group, dim), np.float32)
    mass = lse[token, first_head : first_head + group]
    attend(query, k_cache, v_cache, pages, head, first, slot, True, logits, o_window, mass)

    wanted = scaled(lmk_q, token, first_head, group, scales[1])
    u = _score(wanted, keys, key_strides, bias, pages, candidates, first_head)
    chosen = _choose(u, mass, min(topk, candidates), normalised)
    shares, rest = _shares(u, chosen, mass, softmax1)

    out = np.zeros((group, dim), np.float32)
    top = np.empty(group, np.float32)
    total = np.empty(group, np.float32)
    for n in range(len(chosen)):
        page = pages[chosen[n]]
        multiply(query, k_cache[page, head], size - 1, logits)
        for h in range(group):
            top[h] = -np.inf
        highest(logits, size - 1, top)
        exponents(logits, size - 1, top, total)
        for h in range(group):
            total[h] = shares[n, h] / total[h]
        for j in range(size - 1):
            for h in range(group):
                logits[j, h] *= total[h]
        add_values(logits, v_cache[page, head], size - 1, out)
    for h in range(group):
        result = o[token, first_head + h]
        for i in range(dim):
            result[i] = narrow(out[h, i] + rest[h] * o_window[h, i], result[i])

    for n in range(indices.shape[2]):
        found = n < len(chosen)
        indices[token, head, n] = chosen[n] if found else -1
        for h in range(group):
            scores[token, first_head + h, n] = u[chosen[n], h] if found else -np.inf


@jit
def _score(z, keys, key_strides, bias, pages, candidates, first_head):
    """u [candidates, G]: every candidate page's score by every query head."""
    group, dim = z.shape
    page_stride, head_stride, shared = key_strides
    u = np.empty((candidates, group), np.float32)
    for n in range(candidates):
        page = pages[n]
        for h in range(group):
            at = page * page_stride + (first_head + h) // shared * head_stride
            key, query = keys[at : at + dim], z[h]
            total = np.float32(0)
            for i in range(dim):
                total += query[i] * wide(key[i])
            u[n, h] = total
        if bias.size:
            for h in range(group):
                u[n, h] += bias[page, first_head + h]
    return u


@jit
def _choose(u, mass, count, normalised):
    """Indices of the `count` best rows of u [P, G], ascending; ties go to the first.

    A row is ranked by its best head, after subtracting (if `normalised`) each head's normaliser
    over all rows and the window's mass [G].
    """
    candidates, group = u.shape
    if count == candidates:
        return _first(candidates)
    top = np.zeros(group, np.float32)
    norm = np.zeros(group, np.float32)
    if normalised:
        for h in range(group):
            top[h] = mass[h]
        highest(u, candidates, top)
        for n in range(candidates):
            for h in range(group):
                norm[h] += exp(u[n, h] - top[h])
        for h in range(group):
            norm[h] = math.log(norm[h] + exp(mass[h] - top[h]))
    best = _lowest(candidates)
    for n in range(candidates):
        for h in range(group):
            score = (u[n, h] - top[h]) - norm[h]
            best[n] = score if score > best[n] else best[n]
    return _keep(best, count)


@jit
def _first(count):
    """0 .. count - 1. (np.arange and np.full compile for longer than all of `_keep`.)"""
    numbers = np.empty(count, np.int64)
    for n in range(count):
        numbers[n] = n
    return numbers


@jit
def _lowest(count):
    """-inf for each of `count`."""
    numbers = np.empty(count, np.float32)
    for n in range(count):
        numbers[n] = -np.inf
    return numbers


@jit
def _keep(best, count):
    """Indices of the `count` largest values, ascending; ties go to the first. NaN is the largest.

    The smallest of them is found by bisection on the values' bits, which are ordered like the
    floats (inverted for negative ones): at most 32 vectorised counts.
    """
    keys = np.empty(len(best), np.int32)
    for n in range(len(keys)):
        key = bits(best[n])
        ordered = key if key >= 0 else key ^ np.int32(0x7FFFFFFF)
        keys[n] = ordered if best[n] != 0 else np.int32(0)
    low, high, found = np.int64(-(2**31)), np.int64(2**31 - 1), len(keys)
    while low < high and found != count:
        middle = low + (high - low + 1) // 2
        found = _count(keys, np.int32(middle))
        if found >= count:
            low = middle
        else:
            high = middle - 1
    equal = count
    for n in range(len(keys)):
        equal -= keys[n] > low
    chosen = np.empty(count, np.int64)
    place = 0
    for n in range(len(keys)):
        if keys[n] > low or (keys[n] == low and equal > 0):
            equal -= keys[n] == low
            chosen[place] = n
            place += 1
    return chosen


@jit
def _count(keys, least):
    """Number of keys >= least."""
    found = 0
    for n in range(len(keys)):
        found += keys[n] >= least
    return found


@jit(threads=True)
def choose_pages(u, lse, limits, tokens, normalised, indices, scores):
    """The selection of select_pages from scored pages, with one thread per token.

    Args:
        u: [U, h, c, columns], scores of c tokens of each of U rows; `limits` [U, c] int64 is the
            number of valid columns.
        lse: [T, h] float32; tokens: [U, c] int64, T for none.
        normalised: whether each head's normaliser is subtracted from its scores.
        indices: [T, h_kv, K] int32, -1; scores: [T, h, K], -inf; written.
    """
    width, groups = u.shape[2], indices.shape[1]
    group = u.shape[1] // groups
    for task in prange(len(u) * width):
        unit, place = task // width, task % width
        token, limit = tokens[unit, place], limits[unit, place]
        if token >= len(lse) or limit == 0:
            continue
        for g in range(groups):
            if limit <= indices.shape[2]:
                chosen = _first(limit)
            else:
                best = _lowest(limit)
                for head in range(g * group, (g + 1) * group):
                    # Index all but the last dimension, so that the compiler sees a contiguous line.
                    line = u[unit, head, place][:limit]
                    _better(line, lse[token, head], normalised, best)
                chosen = _keep(best, indices.shape[2])
            for n in range(len(chosen)):
                indices[token, g, n] = chosen[n]
            for head in range(g * group, (g + 1) * group):
                line = u[unit, head, place]
                for n in range(len(chosen)):
                    scores[token, head, n] = line[chosen[n]]


@jit
def _better(line, mass, normalised, best):
    """best[n] = max(best[n], a head's score line[n]), as in `_choose`."""
    top, norm = np.float32(0), np.float32(0)
    if normalised:
        top = max(_largest(line), mass)
        for n in range(len(line)):
            norm += exp(line[n] - top)
        norm = np.float32(math.log(norm + exp(mass - top)))
    for n in range(len(line)):
        score = (line[n] - top) - norm
        best[n] = score if score > best[n] else best[n]


@jit
def _shares(u, chosen, mass, softmax1):
    """Softmax of the chosen rows of u [P, G] and the window's mass [G]: [K, G] and [G].

    softmax1: with an additional logit 0, whose weight is dropped.
    """
    group, count = u.shape[1], len(chosen)
    shares = np.empty((count + 1, group), np.float32)
    top = np.empty(group, np.float32)
    for h in range(group):
        for n in range(count):
            shares[n, h] = u[chosen[n], h]
        shares[count, h] = mass[h]
        top[h] = np.float32(0) if softmax1 else -np.inf
    highest(shares, count + 1, top)
    for h in range(group):
        top[h] = top[h] if top[h] != -np.inf else np.float32(0)
    total = np.empty(group, np.float32)
    exponents(shares, count + 1, top, total)
    for h in range(group):
        if softmax1:
            total[h] += exp(-top[h])
        for n in range(count + 1):
            shares[n, h] /= total[h] if total[h] != 0 else np.float32(1)
    return shares[:count], shares[count]


@jit(threads=True)
def page_weights(scores, lse, softmax1, weights, window_weight):
    """page_weights of [n, K] scores and [n] masses of windows, written to arrays like them."""
    for n in prange(len(lse)):
        line, out = scores[n], weights[n]
        top = max(_largest(line), lse[n])
        top = max(top, np.float32(0)) if softmax1 else top
        if top == -np.inf:
            top = np.float32(0)
        rest = exp(lse[n] - top)
        total = rest + exp(-top) if softmax1 else rest
        for i in range(len(line)):
            out[i] = exp(line[i] - top)
            total += out[i]
        share = np.float32(1) / total if total != 0 else np.float32(0)
        for i in range(len(line)):
            out[i] *= share
        window_weight[n] = rest * share


@jit(threads=True)
def blend_window(o_pages, o_window, window_weight, out):
    """out = o_pages + window_weight * o_window, for rows [n, d] with one weight per row."""
    for n in prange(len(out)):
        pages, window, target = o_pages[n], o_window[n], out[n]
        for i in range(len(target)):
            target[i] = narrow(pages[i] + window_weight[n] * window[i], target[i])


@jit(threads=True)
def take_queries(q, places, scale, out):
    """out[n] = q[places[n]] of q [m, width], in float32, scaled."""
    for n in prange(len(places)):
        given, taken = q[places[n]], out[n]
        for i in range(len(taken)):
            taken[i] = wide(given[i]) * scale


@jit(threads=True)
def weigh(logits, weight, places, shares):
    """Softmax of every row of logits [n G, S], without its last element, times the row's weight.

    Args:
        weight: [m, G] float32. places: [n], the row of `weight` for each G rows of logits.
        shares: [n G, S], written; 0 in the last column.
    """
    group = weight.shape[1]
    for n in prange(len(places)):
        for h in range(group):
            line, out = logits[n * group + h], shares[n * group + h]
            line[-1] = -np.inf
            top, total = _largest(line), np.float32(0)
            for i in range(len(line)):
                line[i] = exp(line[i] - top)
                total += line[i]
            factor = weight[places[n], h] / total
            for i in range(len(line)):
                out[i] = narrow(line[i] * factor, out[i])


@jit
def _largest(line):
    """The maximum of a row, with four independent accumulators."""
    a = b = c = d = np.float32(-np.inf)
    for i in range(0, len(line) - 3, 4):
        a = line[i] if line[i] > a else a
        b = line[i + 1] if line[i + 1] > b else b
        c = line[i + 2] if line[i + 2] > c else c
        d = line[i + 3] if line[i + 3] > d else d
    for i in range(len(line) // 4 * 4, len(line)):
        a = line[i] if line[i] > a else a
    a, c = b if b > a else a, d if d > c else c
    return c if c > a else a


@jit(threads=True)
def add_lines(lines, places, out, parts):
    """out[places[n]] += lines[n] of lines [n, width], in float32; negative places are skipped.

    Each thread handles some columns of all rows, because places may repeat.
    """
    width = lines.shape[1]
    for part in prange(parts):
        begin, end = width * part // parts, width * (part + 1) // parts
        for n in range(len(places)):
            if places[n] >= 0:
                given, target = lines[n, begin:end], out[places[n], begin:end]
                for i in range(end - begin):
                    target[i] += wide(given[i])
