"""Which pages are the best of one token and KV head.

First the topk blocks of largest maximum, which hold all of the topk best candidates, then those
among their members, in the order of their pages. All of these reach the least of the maxima, and
not many others do: of many tokens, the members that do are listed first.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.landmark.kernels.select import candidates_of
from cairn.ops.select_k.kernels import largest, ordered


@triton.jit
def head_normalisers(tops, sums, window, NORMALISED: tl.constexpr):
    """[GP]: logaddexp of the window's lse and the blocks' (tops, sums [BLOCKS, GP]) logarithms of
    summed exponentials; 0 where not asked for, and where there is nothing to sum."""
    normaliser = tl.zeros_like(window)
    if NORMALISED:
        base = tl.maximum(tl.max(tops, 0), window)
        base = tl.where(base == float("-inf"), 0.0, base)
        total = tl.sum(sums * tl.exp(tops - base[None, :]), 0) + tl.exp(window - base)
        normaliser = tl.where(total > 0, base + tl.log(total), 0.0)
    return normaliser


@triton.jit
def winners_of(
    best, reached, topk, indices, K: tl.constexpr, BLOCKS: tl.constexpr, CB: tl.constexpr
):
    """The candidates [K * CB] of the topk best of `reached` blocks, best [BLOCKS] their maxima, and
    how many these are; and the least maximum of them, as `ordered`.

    indices: room for topk numbers, in which the winners line up: to compare every place with every
    block takes longer than all else here.
    """
    b = tl.arange(0, BLOCKS)
    k = tl.arange(0, K)
    kept, order, found = largest(best, b < reached, reached, topk, BLOCKS)
    tl.store(indices + order, b, mask=kept)
    tl.debug_barrier()
    winners = tl.load(indices + k, mask=k < found, other=reached)
    c = tl.reshape(winners[:, None] * CB + tl.arange(0, CB)[None, :], [K * CB])
    return c, found * CB, tl.min(tl.where(kept, ordered(best), 0xFFFFFFFF), 0)


@triton.jit
def winners_among(
    c, total, bound, tops, reached, topk, indices,
    K: tl.constexpr, BLOCKS: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """`winners_of` the maxima at tops, where there are more than K and they are the first BLOCKS at
    most; and what was found of fewer, where bound > 0."""
    if (reached > K) & (reached <= BLOCKS) & (bound == 0):
        b = tl.arange(0, BLOCKS)
        best = tl.load(tops + b, mask=b < reached, other=float("-inf"))
        c, total, bound = winners_of(best, reached, topk, indices, K, BLOCKS, CB)
    return c, total, bound


@triton.jit
def choose_kernel(
    u, part_best, part_sum, lse, slot, indices, scores, offset, size, pages, blocks, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GP: tl.constexpr, K: tl.constexpr,
    KB: tl.constexpr, BLOCKS: tl.constexpr, CB: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """The topk best of one of a few tokens and a KV head, from u [T, KV_HEADS, pages, group] and
    its blocks.

    Args:
        K: topk, padded to a power of two; KB = min(K, BLOCKS); BLOCKS: blocks, padded.
    """
    kv = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    group: tl.constexpr = HEADS // KV_HEADS
    line = token * KV_HEADS + kv
    g = tl.arange(0, GP)
    b = tl.arange(0, BLOCKS)
    heads = (g < group)[None, :]
    window = tl.zeros([GP], tl.float32)
    if NORMALISED:
        at = lse + token * HEADS + kv * group + g
        window = tl.load(at, mask=g < group, other=float("-inf"))
    # Few programs run, bound by load latency, so all loads are issued independently: blocks without
    # a candidate are masked afterwards, and the members of the first blocks, which suffice unless
    # there are many candidates, are loaded at once.
    at = (line * blocks + b)[:, None] * group + g[None, :]
    shown = (b < blocks)[:, None] & heads
    tops = tl.load(part_best + at, mask=shown, other=float("-inf"))
    sums = tops
    if NORMALISED:
        sums = tl.load(part_sum + at, mask=shown, other=0.0)
    c = tl.arange(0, KB * CB)
    at = (line * pages + c)[:, None] * group + g[None, :]
    own = tl.load(u + at, mask=(c < pages)[:, None] & heads, other=float("-inf"))
    candidates = candidates_of(slot, token, offset, size)
    reached = (candidates + CB - 1) // CB
    tops = tl.where((b < reached)[:, None], tops, float("-inf"))
    sums = tl.where((b < reached)[:, None], sums, 0.0)
    normaliser = head_normalisers(tops, sums, window, NORMALISED)
    total = candidates
    if reached > KB:
        best = tl.max(tops - normaliser[None, :], 1)
        c, total, _ = winners_of(best, reached, topk, indices + line * topk, KB, BLOCKS, CB)
        at = (line * pages + c)[:, None] * group + g[None, :]
        own = tl.load(u + at, mask=(c < candidates)[:, None] & heads, other=float("-inf"))
    best = tl.max(tl.where(heads, own - normaliser[None, :], float("-inf")), 1)
    taken, order, found = largest(best, c < candidates, total, topk, KB * CB)
    tl.store(indices + line * topk + order, c, mask=taken)
    rest = tl.arange(0, K)
    empty = (rest >= found) & (rest < topk)
    tl.store(indices + line * topk + rest, rest * 0 - 1, mask=empty)
    at = (token * HEADS + kv * group + g)[None, :] * topk
    tl.store(scores + at + order[:, None], own, mask=taken[:, None] & heads)
    none = tl.full([K, GP], float("-inf"), tl.float32)
    tl.store(scores + at + rest[:, None], none, mask=empty[:, None] & heads)


@triton.jit
def store_best(
    page, score, inside, total, topk, indices, scores, N: tl.constexpr, SCORED: tl.constexpr
):
    """Write those pages [N] whose scores are `largest`, and with SCORED these."""
    taken, order, _ = largest(score, inside, total, topk, N)
    tl.store(indices + order, page, mask=taken)
    if SCORED:
        tl.store(scores + order, score, mask=taken)


@triton.jit
def choose_best_kernel(
    score, tops, slot, listed, listed_score, indices, scores,
    offset, size, pages, blocks, topk,
    KV_HEADS: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, BLOCKS: tl.constexpr,
    CB: tl.constexpr, LEVELS: tl.constexpr, FEW: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """The topk best of one of many tokens and a KV head, from score [T, KV_HEADS, pages] and the
    maxima of its blocks.

    Args:
        listed, listed_score: [T, KV_HEADS, FEW], room for candidates that reach the bound.
        K, KB, BLOCKS: as in `choose_kernel`.
        LEVELS: BLOCKS or a half of them are searched, and so on, as few as a token reaches.
        SCORED: the winners' scores go to scores.
    """
    line = tl.program_id(1).to(tl.int64) * KV_HEADS + tl.program_id(0)
    score += line * pages
    indices += line * topk
    scores += line * topk
    candidates = candidates_of(slot, tl.program_id(1), offset, size)
    reached = (candidates + CB - 1) // CB
    total = candidates
    c = tl.arange(0, KB * CB)
    bound = tl.full([], 0, tl.uint32)
    for level in tl.static_range(LEVELS):
        c, total, bound = winners_among(
            c, total, bound, tops + line * blocks, reached, topk, indices,
            KB, BLOCKS >> (LEVELS - 1 - level), CB,
        )  # fmt: skip
    own = tl.load(score + c, mask=c < candidates, other=float("-inf"))
    hit = (c < candidates) & (ordered(own) >= bound)
    if reached > KB:
        running = tl.cumsum(hit.to(tl.int32), 0)
        total = tl.max(running, 0)
        if total <= FEW:
            at = line * FEW + running - 1
            tl.store(listed + at, c, mask=hit)
            tl.store(listed_score + at, own, mask=hit)
            tl.debug_barrier()
    if (reached > KB) & (total <= FEW):
        f = tl.arange(0, FEW)
        few = tl.load(listed + line * FEW + f, mask=f < total, other=0)
        few_score = tl.load(listed_score + line * FEW + f, mask=f < total, other=float("-inf"))
        store_best(few, few_score, f < total, total, topk, indices, scores, FEW, SCORED)
    else:
        store_best(c, own, hit, total, topk, indices, scores, KB * CB, SCORED)
    rest = tl.arange(0, K)
    empty = (rest >= total) & (rest < topk)
    tl.store(indices + rest, rest * 0 - 1, mask=empty)
    if SCORED:
        tl.store(scores + rest, tl.full([K], float("-inf"), tl.float32), mask=empty)
