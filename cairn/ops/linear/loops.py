"""Products of few rows on the CPU, as fast as their weight is read."""

from __future__ import annotations

import numpy as np

from cairn.ops.activation.loops import silu
from cairn.ops.cpu import jit, narrow, prange, wide
from cairn.ops.cpu.avx512 import LANES, add_products, spread, total
from cairn.ops.norm.loops import norm_row


@jit(threads=True)
def multiply(x, weight, bias, norm, eps, out, add, gated, paired, parts):
    """rmsnorm(x) @ weight.T + bias.

    Args:
        x: [M, K]; weight: [N, K]; bias: [N] or [0]; norm: [K] or [0].
        eps: of the norm.
        out: [M, N], written; gated: [M, N / 2], silu of the first half times the second.
        add: add to what is in `out`.
        paired: x is rounded to its dtype after the norm, and elements are multiplied in pairs
            (AVX512-BF16).
        parts: number of parts of the outputs, for threads.
    """
    rows = _normed(x, norm, eps)
    given = _rounded(rows, x) if paired and norm.size else x
    columns = out.shape[1]
    for part in prange(parts):
        begin, end = columns * part // parts, columns * (part + 1) // parts
        if gated:
            _gated_columns(rows, given, weight, out, paired, begin, end)
        else:
            _columns(rows, given, weight, bias, out, add, paired, begin, end)


@jit
def _normed(x, norm, eps):
    """x [M, K] in float32, after its norm if it has one."""
    rows = np.empty(x.shape, np.float32)
    for m in range(len(x)):
        given, row = x[m], rows[m]
        if norm.size:
            norm_row(given, norm, eps, row)
        else:
            for k in range(len(row)):
                row[k] = wide(given[k])
    return rows


@jit
def _rounded(rows, like):
    """rows [M, K] rounded to the kind of `like`."""
    out = np.empty_like(like)
    for m in range(len(out)):
        for k in range(out.shape[1]):
            out[m, k] = narrow(rows[m, k], out[m, k])
    return out


@jit
def _dots(rows, given, m, weight, lines, paired):
    """Row m . weight[n] for the four n in `lines`.

    Four distant rows at once: a core fetches several streams faster than one.
    """
    if paired:
        return _pair_dots(given, m, weight, lines)
    row = rows[m]
    a, b, c, d = weight[lines[0]], weight[lines[1]], weight[lines[2]], weight[lines[3]]
    of_a = of_b = of_c = of_d = np.float32(0)
    for k in range(len(row)):
        number = row[k]
        of_a += number * wide(a[k])
        of_b += number * wide(b[k])
        of_c += number * wide(c[k])
        of_d += number * wide(d[k])
    return of_a, of_b, of_c, of_d


@jit
def _pair_dots(rows, m, weight, lines):
    width, own = rows.shape[1], m * rows.shape[1]
    a, b, c, d = lines[0] * width, lines[1] * width, lines[2] * width, lines[3] * width
    of_a = of_b = of_c = of_d = spread(np.float32(0))
    whole = width - width % (2 * LANES)
    for k in range(0, whole, 2 * LANES):
        of_a = add_products(of_a, rows, own + k, weight, a + k)
        of_b = add_products(of_b, rows, own + k, weight, b + k)
        of_c = add_products(of_c, rows, own + k, weight, c + k)
        of_d = add_products(of_d, rows, own + k, weight, d + k)
    sum_a, sum_b, sum_c, sum_d = total(of_a), total(of_b), total(of_c), total(of_d)
    for k in range(whole, width):
        number = wide(rows[m, k])
        sum_a += number * wide(weight[lines[0], k])
        sum_b += number * wide(weight[lines[1], k])
        sum_c += number * wide(weight[lines[2], k])
        sum_d += number * wide(weight[lines[3], k])
    return sum_a, sum_b, sum_c, sum_d


@jit
def _columns(rows, given, weight, bias, out, add, paired, begin, end):
    step = (end - begin + 3) // 4
    for n in range(begin, begin + step):
        at = (n, n + step, n + 2 * step, n + 3 * step)
        lines = (n, min(at[1], end - 1), min(at[2], end - 1), min(at[3], end - 1))
        for m in range(len(rows)):
            sums = _dots(rows, given, m, weight, lines, paired)
            for i in range(4):
                if at[i] < end:
                    total = sums[i]
                    if bias.size:
                        total += wide(bias[at[i]])
                    if add:
                        total += wide(out[m, at[i]])
                    out[m, at[i]] = narrow(total, out[m, at[i]])


@jit
def _gated_columns(rows, given, weight, out, paired, begin, end):
    half, step = weight.shape[0] // 2, (end - begin + 1) // 2
    for n in range(begin, begin + step):
        other = min(n + step, end - 1)
        lines = (n, other, half + n, half + other)
        for m in range(len(rows)):
            sums = _dots(rows, given, m, weight, lines, paired)
            out[m, n] = narrow(silu(sums[0]) * sums[2], out[m, n])
            out[m, other] = narrow(silu(sums[1]) * sums[3], out[m, other])
