"""Norms of rows on the CPU."""

from __future__ import annotations

import math

import numpy as np

from cairn.ops.cpu import jit, narrow, prange, wide


@jit
def norm_row(given, weight, eps, row):
    """row = given / sqrt(mean(given^2) + eps) * weight, [H] in float32."""
    square = np.float32(0)
    for i in range(len(given)):
        row[i] = wide(given[i])
        square += row[i] * row[i]
    factor = np.float32(1) / np.float32(math.sqrt(square / np.float32(len(given)) + eps))
    for i in range(len(given)):
        row[i] = row[i] * factor * wide(weight[i])


@jit(threads=True)
def norm_rows(x, weight, eps, out):
    """`norm_row` of every row of x [n, H] to out [n, H], which may be x."""
    for n in prange(len(x)):
        row = np.empty(x.shape[1], np.float32)
        norm_row(x[n], weight, eps, row)
        target = out[n]
        for i in range(len(row)):
            target[i] = narrow(row[i], target[i])
