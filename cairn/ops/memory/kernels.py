"""Kernel of the cache store."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def store_rows_kernel(
    k_cache, v_cache, loc, k, v, k_cache_stride, v_cache_stride, k_stride, v_stride,
    k_width, v_width, BLOCK: tl.constexpr,
):  # fmt: skip
    """cache[loc[token]] = row of the token, BLOCK numbers of both; a negative loc is skipped."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(loc + token).to(tl.int64)
    if at >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(k + token * k_stride + column, mask=column < k_width)
        value = tl.load(v + token * v_stride + column, mask=column < v_width)
        tl.store(k_cache + at * k_cache_stride + column, key, mask=column < k_width)
        tl.store(v_cache + at * v_cache_stride + column, value, mask=column < v_width)
