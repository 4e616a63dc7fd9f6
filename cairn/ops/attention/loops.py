"""Attention of one token's query heads over one KV head's slots, page by page."""

from __future__ import annotations

import math

import numpy as np

from cairn.ops.cpu import exp, jit, narrow, prange, wide


@jit(threads=True)
def attend_windows(q, k_cache, v_cache, row, slot, page_table, rule, scale, o, lse):
    """window_attention, with one thread per token and KV head.

    Args:
        q: [T, h_q, d]; k_cache, v_cache: [pages, h_kv, S, d].
        row, slot: [T] int64; page_table: [rows, max_pages] int32.
        rule: window, aligned, mask_landmarks.
        o: [T, h_q, d]; lse: [T, h_q] float32; written.
    """
    heads = k_cache.shape[1]
    for task in prange(len(q) * heads):
        token, head = task // heads, task % heads
        pages = page_table[row[token]]
        _attend_window(q, k_cache, v_cache, pages, token, head, slot[token], rule, scale, o, lse)


@jit
def _attend_window(q, k_cache, v_cache, pages, token, head, slot, rule, scale, o, lse):
    size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    window, aligned, masked = rule
    first = max(slot - (window - 1), 0)
    if aligned:
        first = first // size * size
    query = scaled(q, token, head * group, group, scale)
    logits = np.empty((size, group), np.float32)
    out = np.zeros(query.shape, np.float32)
    mass = lse[token, head * group : (head + 1) * group]
    attend(query, k_cache, v_cache, pages, head, first, slot, masked, logits, out, mass)
    for h in range(group):
        result = o[token, head * group + h]
        for i in range(len(result)):
            result[i] = narrow(out[h, i], result[i])


@jit
def scaled(q, token, first, group, scale):
    """Heads first .. first + group - 1 of a token of q [T, h_q, d]: float32 [group, d], scaled."""
    dim = q.shape[2]
    out = np.empty((group, dim), np.float32)
    for h in range(group):
        head = q[token, first + h]
        for i in range(dim):
            out[h, i] = wide(head[i]) * scale
    return out


@jit
def multiply(q, keys, count, logits):
    """logits[j, h] = q[h] . keys[j] for the first `count` keys; q is float32 [G, d]."""
    group, dim = q.shape
    for j in range(count):
        key = keys[j]
        # Four heads share one conversion of the key to float32.
        for h in range(0, group - 3, 4):
            a, b, c, d = q[h], q[h + 1], q[h + 2], q[h + 3]
            of_a = of_b = of_c = of_d = np.float32(0)
            for i in range(dim):
                number = wide(key[i])
                of_a += a[i] * number
                of_b += b[i] * number
                of_c += c[i] * number
                of_d += d[i] * number
            logits[j, h], logits[j, h + 1] = of_a, of_b
            logits[j, h + 2], logits[j, h + 3] = of_c, of_d
        for h in range(group // 4 * 4, group):
            query, total = q[h], np.float32(0)
            for i in range(dim):
                total += query[i] * wide(key[i])
            logits[j, h] = total


@jit
def highest(logits, count, top):
    """top[h] = the largest of top[h] and logits[j, h]."""
    group = logits.shape[1]
    for j in range(count):
        for h in range(group):
            top[h] = logits[j, h] if logits[j, h] > top[h] else top[h]


@jit
def exponents(logits, count, top, total):
    """logits[j, h] = exp(logits[j, h] - top[h]); total[h] is their sum."""
    group = logits.shape[1]
    for h in range(group):
        total[h] = np.float32(0)
    for j in range(count):
        for h in range(group):
            logits[j, h] = exp(logits[j, h] - top[h])
    for j in range(count):
        for h in range(group):
            total[h] += logits[j, h]


@jit
def add_values(shares, values, count, out):
    """out[h] += shares[j, h] values[j]; out is float32 [G, d]."""
    group, dim = out.shape
    # Four values are added per load and store of the output line.
    for j in range(0, count - 3, 4):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        for h in range(group):
            line = out[h]
            of_a, of_b = shares[j, h], shares[j + 1, h]
            of_c, of_d = shares[j + 2, h], shares[j + 3, h]
            for i in range(dim):
                line[i] += (
                    of_a * wide(a[i]) + of_b * wide(b[i]) + of_c * wide(c[i]) + of_d * wide(d[i])
                )
    for j in range(count // 4 * 4, count):
        value = values[j]
        for h in range(group):
            line, share = out[h], shares[j, h]
            for i in range(dim):
                line[i] += share * wide(value[i])


@jit
def attend(q, k_cache, v_cache, pages, head, first, last, masked, logits, out, lse):
    """Attention over slots first .. last of a row.

    Args:
        q: float32 [G, d], scaled.
        k_cache, v_cache: [pages, h_kv, S, d]; pages: [any], physical pages of the row.
        head: the KV head.
        masked: whether the last slot of a page is masked.
        logits: float32 [S, G], overwritten.
        out: float32 [G, d], 0 before; lse: float32 [G]. Without a key they are 0 and -inf.
    """
    group, dim = q.shape
    size = k_cache.shape[2]
    top = np.empty(group, np.float32)
    whole = np.zeros(group, np.float32)
    higher = np.empty(group, np.float32)
    total = np.empty(group, np.float32)
    for h in range(group):
        top[h] = -np.inf
    for page in range(first // size, last // size + 1):
        begin = max(first - page * size, 0)
        count = min(last + 1 - page * size, size - masked) - begin
        if count <= 0:
            continue
        multiply(q, k_cache[pages[page], head, begin:], count, logits)
        for h in range(group):
            higher[h] = top[h]
        highest(logits, count, higher)
        exponents(logits, count, higher, total)
        for h in range(group):
            rest = exp(top[h] - higher[h]) if whole[h] > 0 else np.float32(0)
            top[h] = higher[h]
            whole[h] = whole[h] * rest + total[h]
            if rest != 1:
                for i in range(dim):
                    out[h, i] *= rest
        add_values(logits, v_cache[pages[page], head, begin:], count, out)
    for h in range(group):
        lse[h] = -np.inf
        if whole[h] != 0:
            lse[h] = top[h] + math.log(whole[h])
            for i in range(dim):
                out[h, i] /= whole[h]
