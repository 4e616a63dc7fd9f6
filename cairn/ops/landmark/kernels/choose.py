"""Kernels that select the best pages per token and KV head.

First the topk blocks with the largest maxima are found, which contain all of the topk best
candidates; then the best among their members, in the order of pages. All of these reach the least
of the topk maxima, and few others do: with many tokens, the members that reach it are listed first.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.landmark.kernels.select import candidates_of
from cairn.ops.select_k.kernels import largest, ordered


@triton.jit
def head_normalisers(tops, sums, window, NORMALISED: tl.constexpr):
    """[GP]: logaddexp of the window's lse and the blocks' (tops, sums [BLOCKS, GP]) logarithms of
    summed exponentials; 0 if not NORMALISED, or if there is nothing to sum."""
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
    """The candidates [K * CB] in the topk best of `reached` blocks, given the blocks' maxima best
    [BLOCKS]; the number of these candidates; and the least of the topk maxima, as an `ordered` key.

    indices: memory for topk integers, in which winning blocks are compacted: comparing every output
    position with every block would take longer than all the rest.
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
    """`winners_of` applied to the maxima at `tops` if there are more than K blocks and at most
    BLOCKS; otherwise the given c, total and bound."""
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
    """Select the topk best pages of one token and KV head, for few tokens, from u [T, KV_HEADS,
    pages, group] and the maxima of its blocks.

    Args:
        K: topk, padded to a power of two. KB: min(K, BLOCKS). BLOCKS: number of blocks, padded.
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
    # Few programs run, and load latency dominates, so all loads are issued independently: blocks
    # without a candidate are masked afterwards, and the members of the first blocks, which suffice
    # unless there are many candidates, are loaded at once.
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
    """Write the pages [N] with the topk largest scores and, with SCORED, the scores."""
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
    """Select the topk best pages of one token and KV head, for many tokens, from score [T,
    KV_HEADS, pages] and the maxima of its blocks.

    Args:
        listed, listed_score: [T, KV_HEADS, FEW], workspace for candidates that reach the bound.
        K, KB, BLOCKS: as in `choose_kernel`.
        LEVELS: the search uses BLOCKS, BLOCKS / 2, ... blocks, the smallest number that covers a
            token's candidates.
        SCORED: write the winners' scores to `scores`.
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
