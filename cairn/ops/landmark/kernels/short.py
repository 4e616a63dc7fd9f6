"""Kernels of landmark_attention for rows so short that every page before the window is selected: no
search is needed, and a tile of tokens attends to these pages as to its window."""

from __future__ import annotations

from cairn.ops.attention.kernels import (
    attend_row,
    finish,
    first_visible,
    load_keys,
    load_rows,
    load_values,
    store_rows,
    tile_rows,
)
from cairn.ops.cache.kernels import slot_start
from cairn.ops.gpu import tl, triton
from cairn.ops.landmark.kernels.pages import layer_totals, load_scores
from cairn.ops.landmark.kernels.select import tile_scores


@triton.jit(do_not_specialize=["tokens"])
def short_scores_kernel(
    lmk_q, key, bias, row, slot, page_table, scores, indices, tokens,
    offset, size, scale, table_stride, page_stride, head_stride, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    DP: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write scores [T, HEADS, topk] and indices [T, KV_HEADS, topk] of all candidates (at most topk
    per token), for TOKENS tokens and one head.

    Args:
        bias: [pages, HEADS].
        offset, size: a slot's candidates are max(slot - offset, 0) // size.
        K: topk, padded to a power of two, >= 16.
    """
    head = tl.program_id(0)
    c = tl.arange(0, K)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    alive = token < tokens
    own_row = tl.load(row + token, mask=alive, other=-1)
    own_slot = tl.load(slot + token, mask=alive, other=-1).to(tl.int32)
    candidates = tl.maximum(own_slot - offset, 0) // size
    token = token.to(tl.int64)
    shown = c[None, :] < candidates[:, None]
    if head % (HEADS // KV_HEADS) == 0:
        line = token * KV_HEADS + head // (HEADS // KV_HEADS)
        written = alive[:, None] & (c < topk)[None, :]
        found = tl.where(shown, c[None, :], -1)
        tl.store(indices + (line * topk)[:, None] + c[None, :], found, mask=written)
    this_row = tl.min(tl.where(alive, own_row, 2147483647), 0)
    while this_row < 2147483647:
        mine = alive & (own_row == this_row)
        most = tl.max(tl.where(mine, candidates, 0), 0)
        value = tl.full(shown.shape, float("-inf"), tl.float32)
        if most > 0:
            query = load_rows(lmk_q + (token * HEADS + head) * DIM, alive, DIM, DP)
            found = tile_scores(
                query, page_table + this_row * table_stride, key, bias, c, c < most, head,
                page_stride, head_stride, scale, 1.0, HEADS, KEY_HEADS, DIM, DP, BIAS, PRECISION,
            )  # fmt: skip
            value = tl.where(shown, found, float("-inf"))
        written = mine[:, None] & (c < topk)[None, :]
        line = (token * HEADS + head) * topk
        tl.store(scores + line[:, None] + c[None, :], value, mask=written)
        this_row = tl.min(tl.where(alive & (own_row > this_row), own_row, 2147483647), 0)


@triton.jit
def add_pages(
    acc, query, k_head, v_head, table, scores, base, total, most, mine, factor, page_stride,
    DIM: tl.constexpr, SIZE: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [M, DP] plus the attention inside each of a row's first `most` pages, weighted by the
    page's share exp(score - base) / total of the layer's softmax.

    Args:
        scores: [M], addresses of the scores of every row.
        mine: [M], mask of the tile's rows that belong to the sequence.
    """
    t = tl.arange(0, KEYS)
    inside = t < SIZE - 1
    for c in range(most):
        line = tl.load(table + c).to(tl.int64) * page_stride + slot_start(k_head, t, DIM)
        score = tl.load(scores + c, mask=mine, other=float("-inf"))
        key = load_keys(k_head, line, t, inside, query.dtype, DIM, SIZE, DP)
        value = load_values(v_head, line, t, inside, query.dtype, DIM, SIZE, DP)
        logits = tl.dot(query, key, input_precision=PRECISION) * factor
        logits = tl.where(inside[None, :], logits, float("-inf"))
        p = tl.exp2(logits - tl.max(logits, 1)[:, None])
        share = tl.exp(score - base) / (total * tl.sum(p, 1))
        p = (p * share[:, None]).to(value.dtype)
        acc = tl.dot(p, value, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["tokens"])
def short_kernel(
    q, k_cache, v_cache, row, slot, page_table, scores, o, lse, tokens,
    window, scale, table_stride, page_stride, head_stride, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, K: tl.constexpr, SOFTMAX1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o [T, HEADS, DIM] of the layer and lse [T, HEADS] of the windows, which begin at page
    borders, for a tile of tokens and one KV head.

    Args:
        scores: [T, HEADS, topk], from `short_scores_kernel`.
        KEYS: slots of the window per iteration. PAGE: page size, padded to a power of two, >= 16.
            K: topk, padded to a power of two.
    """
    kv = tl.program_id(0)
    place, alive, own_row, own_slot = tile_rows(row, slot, tokens, HEADS, KV_HEADS, TOKENS, GP)
    first = first_visible(own_slot, window, SIZE, True)
    query = load_rows(q + place * DIM, alive, DIM, DP)
    factor = scale * 1.4426950408889634
    k_head = k_cache + kv.to(tl.int64) * head_stride
    v_head = v_cache + kv.to(tl.int64) * head_stride
    this_row = tl.min(tl.where(alive, own_row, 2147483647), 0)
    while this_row < 2147483647:
        mine = alive & (own_row == this_row)
        table = page_table + this_row * table_stride
        best, summed, acc, _ = attend_row(
            query, k_head, v_head, table, own_slot, first, alive, mine, factor, page_stride,
            None, None, kv, 0, 0, 0, DIM, SIZE, DP, KEYS, True, PRECISION, 0,
        )  # fmt: skip
        acc, value = finish(best, summed, acc)
        most = tl.max(tl.where(mine, first, 0), 0) // SIZE
        if most > 0:
            score = load_scores(scores, place, topk, mine, K)
            base, total, own = layer_totals(score, value, SOFTMAX1)
            acc = add_pages(
                acc * (own / total)[:, None], query, k_head, v_head, table, scores + place * topk,
                base, total, most, mine, factor, page_stride, DIM, SIZE, DP, PAGE, PRECISION,
            )  # fmt: skip
        elif SOFTMAX1:
            acc *= tl.sigmoid(value)[:, None]
        store_rows(o + place * DIM, acc, mine, DIM, DP)
        tl.store(lse + place, value, mask=mine)
        this_row = tl.min(tl.where(alive & (own_row > this_row), own_row, 2147483647), 0)
