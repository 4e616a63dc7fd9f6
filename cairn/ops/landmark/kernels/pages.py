"""Kernels of page_attention: attention inside each selected page, weighed by the page."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def pages_kernel(
    q, k_cache, v_cache, row, page_table, indices, weights, o,
    scale, table_stride, page_stride, head_stride, topk, each,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`each` selected pages of one token and KV head: o [T, HEADS, splits, DIM] float32.

    Args:
        GP: heads of the group, padded to a power of two, >= 16.
        KEYS: slots of a page, padded to a power of two, >= 16.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.arange(0, GP)
    d = tl.arange(0, DP)
    t = tl.arange(0, KEYS)
    head = token * HEADS + kv * group + m
    alive = m < group
    column = tl.minimum(d, DIM - 1)
    shown = alive[:, None] & (d < DIM)[None, :]
    query = tl.load(q + head[:, None] * DIM + d[None, :], mask=shown, other=0.0)
    table = page_table + tl.load(row + token) * table_stride
    inside = t < SIZE - 1
    acc = tl.zeros([GP, DP], tl.float32)
    for place in range(split * each, tl.minimum(split * each + each, topk)):
        logical = tl.load(indices + (token * KV_HEADS + kv) * topk + place)
        if logical >= 0:
            page = tl.load(table + logical).to(tl.int64)
            line = page * page_stride + kv * head_stride + t * DIM
            key = tl.load(
                k_cache + line[None, :] + column[:, None], mask=inside[None, :], other=0.0
            )
            logits = tl.dot(query, key, input_precision=PRECISION) * (scale * 1.4426950408889634)
            logits = tl.where(inside[None, :], logits, float("-inf"))
            p = tl.exp2(logits - tl.max(logits, 1)[:, None])
            weight = tl.load(weights + head * topk + place, mask=alive, other=0.0)
            p = p * (weight / tl.sum(p, 1))[:, None]
            value = tl.load(
                v_cache + line[:, None] + column[None, :], mask=inside[:, None], other=0.0
            )
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    at = (head * tl.num_programs(2) + split)[:, None] * DIM + d[None, :]
    tl.store(o + at, acc, mask=shown)


@triton.jit(do_not_specialize=["splits"])
def sum_kernel(parts, o, splits, DIM: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    """o [T, HEADS, DIM]: the sum of one (token, head)'s splits."""
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    at = (place * splits + s)[:, None] * DIM + d[None, :]
    part = tl.load(parts + at, mask=(s < splits)[:, None] & (d < DIM)[None, :], other=0.0)
    tl.store(o + place * DIM + d, tl.sum(part, 0), mask=d < DIM)
