"""Gates on the CPU."""

from __future__ import annotations

import numpy as np

from cairn.ops.cpu import exp, jit, narrow, prange, wide
from cairn.ops.cpu.avx512 import LANES, LOG2_E, exp2, spread, store_rounded, widened


@jit
def silu(x):
    """x / (1 + e ** -x), without a power that overflows."""
    e = exp(-abs(x))
    return (x if x >= 0 else x * e) / (np.float32(1) + e)


@jit(threads=True)
def silu_and_mul(gates, ups, first, out):
    """out [n, d] = silu of the first d of gates [n, any], times d of ups [n, any] from `first`."""
    width = out.shape[1]
    for n in prange(len(out)):
        gate, up, target = gates[n, :width], ups[n, first : first + width], out[n]
        for i in range(width):
            target[i] = narrow(silu(wide(gate[i])) * wide(up[i]), target[i])


@jit(threads=True)
def silu_and_mul_lanes(gates, ups, first, out):
    """The same of bfloat16, sixteen elements at once; d is a multiple of 16, out may be gates."""
    one, power = spread(np.float32(1)), spread(-LOG2_E)
    for n in prange(len(out)):
        gate, up, target = n * gates.shape[1], n * ups.shape[1] + first, n * out.shape[1]
        for i in range(0, out.shape[1], LANES):
            x = widened(gates, gate + i)
            y = x / (one + exp2(x * power)) * widened(ups, up + i)
            store_rounded(out, target + i, y)
