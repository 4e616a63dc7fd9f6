"""Products of few rows on the CPU, as fast as their weight is read."""

from __future__ import annotations

import numpy as np

from cairn.ops.activation.loops import silu
from cairn.ops.cpu import jit, narrow, prange, wide
from cairn.ops.norm.loops import norm_row


@jit(threads=True)
def multiply(x, weight, bias, norm, eps, out, add, gated, parts):
    """rmsnorm(x) @ weight.T + bias.

    Args:
        x: [M, K]; weight: [N, K]; bias: [N] or [0]; norm: [K] or [0].
        eps: of the norm.
        out: [M, N], written; gated: [M, N / 2], silu of the first half times the second.
        add: add to what is in `out`.
        parts: that the columns are cut into, for the threads.
    """
    rows = _normed(x, norm, eps)
    columns = out.shape[1]
    for part in prange(parts):
        begin, end = columns * part // parts, columns * (part + 1) // parts
        if gated:
            _gated_columns(rows, weight, out, begin, end)
        else:
            _columns(rows, weight, bias, out, add, begin, end)


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
def _dots(row, a, b, c, d):
    """row . a, row . b, row . c, row . d.

    Four lines at once, far from each other: a core fetches several streams faster than one.
    """
    of_a = of_b = of_c = of_d = np.float32(0)
    for k in range(len(row)):
        number = row[k]
        of_a += number * wide(a[k])
        of_b += number * wide(b[k])
        of_c += number * wide(c[k])
        of_d += number * wide(d[k])
    return of_a, of_b, of_c, of_d


@jit
def _columns(rows, weight, bias, out, add, begin, end):
    step = (end - begin + 3) // 4
    for n in range(begin, begin + step):
        at = (n, n + step, n + 2 * step, n + 3 * step)
        a, b = weight[n], weight[min(at[1], end - 1)]
        c, d = weight[min(at[2], end - 1)], weight[min(at[3], end - 1)]
        for m in range(len(rows)):
            sums = _dots(rows[m], a, b, c, d)
            for i in range(4):
                if at[i] < end:
                    total = sums[i]
                    if bias.size:
                        total += wide(bias[at[i]])
                    if add:
                        total += wide(out[m, at[i]])
                    out[m, at[i]] = narrow(total, out[m, at[i]])


@jit
def _gated_columns(rows, weight, out, begin, end):
    half, step = weight.shape[0] // 2, (end - begin + 1) // 2
    for n in range(begin, begin + step):
        other = min(n + step, end - 1)
        a, b, c, d = weight[n], weight[other], weight[half + n], weight[half + other]
        for m in range(len(rows)):
            gate, gate_other, up, up_other = _dots(rows[m], a, b, c, d)
            out[m, n] = narrow(silu(gate) * up, out[m, n])
            out[m, other] = narrow(silu(gate_other) * up_other, out[m, other])
