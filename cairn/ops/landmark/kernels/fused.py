"""Kernels that landmark_attention has of its own: two of its four launches.

A selected page's share of a layer's softmax is exp of its score, and the window's is exp of its
lse: pages and splits of the window are states of one ordinary merge. So the window's splits and the
scores need nothing of each other, and run side by side in `scan_kernel`; `pick_kernel` selects, and
`pages_kernel` and `merge_kernel` do the rest. With EARLY each is launched before the one in front
is done, and waits for it.
"""

from __future__ import annotations

from cairn.ops.attention.kernels import attend_split, await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.landmark.kernels.select import choose, score_blocks


@triton.jit
def scan_kernel(
    q, k_cache, v_cache, lmk_q, key, bias, row, slot, page_table,
    part_o, part_lse, u, part_best, part_sum,
    splits, parts, window, scale, table_stride, page_stride, head_stride,
    offset, score_scale, key_page_stride, key_head_stride, pages, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, GP: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, CB: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first `splits` programs attend the window of a token and KV head, the others score."""
    await_previous(EARLY)
    program = tl.program_id(0)
    kv = tl.program_id(1)
    token = tl.program_id(2)
    if program < splits:
        attend_split(
            q, k_cache, v_cache, row, slot, page_table, part_o, part_lse, parts,
            window, scale, table_stride, page_stride, head_stride, token, kv, program, splits,
            HEADS, KV_HEADS, DIM, SIZE, ROWS, DP, KEYS, True, True, PRECISION,
        )  # fmt: skip
    else:
        score_blocks(
            lmk_q, key, bias, slot, row, page_table, u, part_best, part_sum,
            offset, SIZE, score_scale, table_stride, key_page_stride, key_head_stride,
            pages, blocks, token, kv, program - splits, tl.num_programs(0) - splits,
            HEADS, KV_HEADS, KEY_HEADS, DIM, GP, DP, TILE, CB, BIAS,
        )  # fmt: skip


@triton.jit
def pick_kernel(
    u, part_best, part_sum, part_lse, slot, indices, scores, lse,
    splits, parts, offset, size, pages, blocks, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GP: tl.constexpr, K: tl.constexpr,
    KB: tl.constexpr, BLOCKS: tl.constexpr, CB: tl.constexpr, SPLITS: tl.constexpr,
    NORMALISED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """lse [T, HEADS] of the window from its splits' (the first of `parts`), then `choose`."""
    await_previous(EARLY)
    kv = tl.program_id(0)
    token = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    g = tl.arange(0, GP)
    s = tl.arange(0, SPLITS)
    own = g < group
    head = token.to(tl.int64) * HEADS + kv * group + g
    logs = tl.load(
        part_lse + head[:, None] * parts + s[None, :],
        mask=own[:, None] & (s < splits)[None, :], other=float("-inf"),
    )  # fmt: skip
    best = tl.max(logs, 1)
    base = tl.where(best == float("-inf"), 0.0, best)
    window = base + tl.log(tl.sum(tl.exp(logs - base[:, None]), 1))
    tl.store(lse + head, window, mask=own)
    choose(
        u, part_best, part_sum, window, slot, indices, scores, offset, size, pages, blocks, topk,
        token, kv, HEADS, KV_HEADS, GP, K, KB, BLOCKS, CB, NORMALISED, True,
    )  # fmt: skip
