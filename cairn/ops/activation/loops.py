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
def silu_and_mul(gates, ups, first, out):
    """out [n, d] = silu of the first d of gates [n, any], times d of ups [n, any] from `first`."""
    width = out.shape[1]
    for n in prange(len(out)):
        gate, up, target = gates[n, :width], ups[n, first : first + width], out[n]
        for i in range(width):
            target[i] = narrow(silu(wide(gate[i])) * wide(up[i]), target[i])
