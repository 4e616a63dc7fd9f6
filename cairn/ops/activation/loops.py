"""Gates on the CPU."""

from __future__ import annotations

import numpy as np

from cairn.ops.cpu import exp, jit, narrow, prange, wide


@jit
def silu(x):
    """x / (1 + e ** -x), without a power that overflows."""
    e = exp(-abs(x))
    return (x if x >= 0 else x * e) / (np.float32(1) + e)


@jit(threads=True)
def silu_and_mul(x, out):
    """silu(x[:, :d]) * x[:, d:] of x [n, 2 d] in out [n, d]."""
    width = out.shape[1]
    for n in prange(len(x)):
        gate, up, target = x[n, :width], x[n, width:], out[n]
        for i in range(width):
            target[i] = narrow(silu(wide(gate[i])) * wide(up[i]), target[i])


@jit(threads=True)
def multiply_by_silu(gate, out):
    """out [n, d] = silu(gate [n, d]) * out."""
    for n in prange(len(out)):
        given, target = gate[n], out[n]
        # Of what is read and written in one place compilers make no vectors.
        row = np.empty(len(target), np.float32)
        for i in range(len(row)):
            row[i] = silu(wide(given[i])) * wide(target[i])
        for i in range(len(row)):
            target[i] = narrow(row[i], target[i])
