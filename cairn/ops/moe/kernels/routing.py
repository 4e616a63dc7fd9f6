"""Kernels of the routers: a token's expert scores, the choice of expert groups, and top-k."""

from __future__ import annotations

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous

LAST = gpu.constant(0x7FFFFFFF)


@triton.jit
def key_of(rank, index):
    """int64 keys that order experts by rank, the lower index first among ties; NaN ranks as -inf.
    No key equals -2 ** 63."""
    rank = tl.where(rank == rank, rank, float("-inf")) + 0.0  # -0 is 0
    bits = rank.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & LAST)
    return (bits.to(tl.int64) << 32) + (LAST - index)


@triton.jit
def rank_of(key):
    """The rank of a key."""
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & LAST)).to(tl.float32, bitcast=True)


@triton.jit
def sqrt_softplus(x):
    """sqrt(log(1 + e^x)) in float32."""
    power = tl.exp(x)
    wide = 1.0 + power
    # log(1 + p) of small p (Kahan).
    near = tl.where(wide == 1.0, 1.0, wide - 1.0)
    soft = tl.where(wide == 1.0, power, tl.log(wide) * (power / near))
    return tl.sqrt(tl.where(x > 20.0, x, soft))


@triton.jit
def score_of(x, inside, cap, SCORE: tl.constexpr, CAPPED: tl.constexpr):
    """Scores of one token's experts, float32: softmax over all of them, or sigmoid or
    sqrt(softplus) of each."""
    if SCORE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    if SCORE == "sqrtsoftplus":
        return sqrt_softplus(x)
    x = tl.where(inside, x, float("-inf"))
    power = tl.exp(x - tl.max(tl.max(x, 1), 0))
    return power / tl.sum(tl.sum(power, 1), 0)


@triton.jit
def in_best_groups(keys, group, kept, BEST: tl.constexpr):
    """Whether each group [G, 1] is among the `kept` best; a group is ranked by the sum of the BEST
    largest ranks of its keys [G, S]."""
    lowest: tl.constexpr = -(1 << 63)
    first = tl.max(keys, 1)
    rank = rank_of(first)
    if BEST == 2:
        rank += rank_of(tl.max(tl.where(keys == first[:, None], lowest, keys), 1))
    # Padding groups have no keys.
    own = tl.where(first == lowest, lowest, key_of(rank, group))
    chosen = own != own
    for _ in range(kept):
        top = tl.max(own, 0)
        chosen = chosen | (own == top)
        own = tl.where(own == top, lowest, own)
    return chosen[:, None]


@triton.jit
def shared_weight(gate, row, gate_stride):
    """The weight of a token's shared experts: 1, or sigmoid of the token's element of gate [T,
    1]."""
    if gate is None:
        weight = 1.0
    else:
        weight = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
    return weight


@triton.jit(early=())
def routing_kernel(
    gating, bias, gate, weights, ids, gating_stride, gate_stride, weights_stride, ids_stride,
    experts, size, kept, topk, shared, cap, share, floor, factor,
    G: tl.constexpr, S: tl.constexpr, KP: tl.constexpr, SCORE: tl.constexpr, CAPPED: tl.constexpr,
    BEST: tl.constexpr, ROUNDED: tl.constexpr, RENORMALIZE: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """weights [T, topk + shared] float32 and ids of the best experts of each token.

    Args:
        gating: [T, experts], groups of `size` consecutive experts; a tile is [G, S].
        bias: [experts] or None: added to the input of a softmax; otherwise to the scores for
            ranking only.
        kept: number of groups to choose from, ranked by the sum of their BEST best; BEST = 0: all
            groups.
        topk: experts chosen; they are followed by `shared` shared experts with ids from `experts`
            on.
        share: the weight of a shared expert is sum / share, then normalised and scaled like the
            others. WHOLE: it is `shared_weight` of the gate instead, without either.
        cap: CAPPED: x becomes cap * tanh(x / cap).
        ROUNDED: scores, and their sums with the bias, are rounded to the dtype of `gating`.
        RENORMALIZE: weights are divided by their sum + floor. factor: all weights are multiplied by
            it.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G), tl.arange(0, S)
    index = group[:, None] * size + member[None, :]
    inside = (index < experts) & (member < size)[None, :]
    x = tl.load(gating + row * gating_stride + index, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        x = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / cap)))
    shift = tl.zeros((G, S), tl.float32)
    if bias is not None:
        shift = tl.load(bias + index, mask=inside, other=0.0).to(tl.float32)
    if SCORE == "softmax":
        score = score_of(x + shift, inside, cap, SCORE, CAPPED)
        rank = score
    else:
        score = score_of(x, inside, cap, SCORE, CAPPED)
        if ROUNDED:
            score = score.to(gating.dtype.element_ty).to(tl.float32)
        rank = score + shift
        if ROUNDED:
            rank = rank.to(gating.dtype.element_ty).to(tl.float32)
    lowest: tl.constexpr = -(1 << 63)
    keys = tl.where(inside, key_of(rank, index), lowest)
    if BEST > 0:
        rank = tl.where(in_best_groups(keys, group, kept, BEST), rank, float("-inf"))
        keys = tl.where(inside, key_of(rank, index), lowest)
    slot = tl.arange(0, KP)
    weight = tl.zeros((KP,), tl.float32)
    chosen = experts + slot - topk
    for number in range(topk):
        top = tl.max(tl.max(keys, 1), 0)
        found = LAST - (top & 0xFFFFFFFF).to(tl.int32)
        own = tl.sum(tl.sum(tl.where(index == found, score, 0.0), 1), 0)
        weight = tl.where(slot == number, own, weight)
        chosen = tl.where(slot == number, found, chosen)
        keys = tl.where(keys == top, lowest, keys)
    total = tl.sum(weight, 0)
    weight = tl.where((slot >= topk) & (slot < topk + shared), total / share, weight)
    if RENORMALIZE:
        weight = weight / (total + floor)
    weight *= factor
    if WHOLE:
        weight = tl.where(slot < topk, weight, shared_weight(gate, row, gate_stride))
    there = slot < topk + shared
    tl.store(weights + row * weights_stride + slot, weight, mask=there)
    tl.store(ids + row * ids_stride + slot, chosen, mask=there)


@triton.jit(early=())
def hash_kernel(
    gating, table, tokens, gate, weights, ids, gating_stride, gate_stride, experts, topk, shared,
    factor, KP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the experts [topk] of a token's row of the table, the shared experts, and their
    weights; see `hash_topk`. KP: topk + shared, padded. PDL: as in `await_previous`."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, KP)
    inside = place < topk
    chosen = tl.load(table + tl.load(tokens + token) * topk + place, mask=inside, other=0)
    known = inside & (chosen >= 0) & (chosen < experts)
    x = tl.load(gating + token * gating_stride + chosen, mask=known, other=0.0).to(tl.float32)
    score = tl.where(inside, sqrt_softplus(x), 0.0)
    weight = score / tl.sum(score, 0) * factor
    weight = tl.where(inside, weight, shared_weight(gate, token, gate_stride))
    chosen = tl.where(inside, chosen, experts + place - topk)
    slots = topk + shared
    tl.store(weights + token * slots + place, weight, mask=place < slots)
    tl.store(ids + token * slots + place, chosen, mask=place < slots)
