"""Kernels that scatter rows into caches and gather rows of a table."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous


@triton.jit
def store_rows_kernel(
    k_cache, v_cache, loc, k, v, k_cache_stride, v_cache_stride, k_stride, v_stride,
    k_width, v_width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """cache[loc[token]] = row of the token, BLOCK elements of both; a negative loc is skipped. A
    token has BLOCKS programs."""
    token, part = row_and_part(BLOCKS)
    column = part * BLOCK + tl.arange(0, BLOCK)
    # The location is loaded last: only the stores depend on it.
    key = tl.load(k + token * k_stride + column, mask=column < k_width)
    value = tl.load(v + token * v_stride + column, mask=column < v_width)
    at = tl.load(loc + token).to(tl.int64)
    tl.store(k_cache + at * k_cache_stride + column, key, mask=(column < k_width) & (at >= 0))
    tl.store(v_cache + at * v_cache_stride + column, value, mask=(column < v_width) & (at >= 0))


@triton.jit(early=())
def take_rows_kernel(
    table, index, out, stride, width,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = table[index[row]], BLOCK elements of it: a row has BLOCKS programs. PDL: as in
    `await_previous`."""
    await_previous(PDL)
    row, part = row_and_part(BLOCKS)
    column = part * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + row).to(tl.int64)
    value = tl.load(table + at * stride + column, mask=column < width)
    tl.store(out + row * width + column, value, mask=column < width)
