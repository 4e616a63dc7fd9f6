"""Routers against float64 loops over tokens; ties go to the lower index."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument


def outputs(tokens: int, topk: int) -> tuple[Tensor, Tensor]:
    return torch.full((tokens, topk), torch.nan), torch.full((tokens, topk), -7, dtype=torch.int32)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def best(ranks: list[float], count: int, among: set[int] | None = None) -> list[int]:
    allowed = range(len(ranks)) if among is None else among
    return sorted(allowed, key=lambda e: (-ranks[e], e))[:count]


def in_groups(ranks: list[float], groups: int, kept: int, count: int) -> set[int]:
    """Experts of the best groups, ranked by the sum of their `count` best."""
    size = len(ranks) // groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    sums = [sum(sorted((ranks[e] for e in own), reverse=True)[:count]) for own in members]
    return {e for g in best(sums, kept) for e in members[g]}


def same(weights: Tensor, ids: Tensor, wanted: list[tuple[list[float], list[int]]]) -> None:
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ids.tolist() == [chosen for _, chosen in wanted]
    expected = torch.tensor([row for row, _ in wanted])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_softmax(cap: float, renormalize: bool) -> None:
    torch.manual_seed(1)
    gating, bias = torch.randn(6, 10) * 3, torch.randn(10)
    weights, ids = outputs(6, 4)
    ops.topk_softmax(weights, ids, gating, renormalize, cap, bias)
    wanted = []
    for row in gating.tolist():
        x = [cap * math.tanh(value / cap) if cap else value for value in row]
        e = [math.exp(value + shift) for value, shift in zip(x, bias.tolist(), strict=True)]
        p = [value / sum(e) for value in e]
        chosen = best(p, 4)
        total = sum(p[i] for i in chosen) if renormalize else 1.0
        wanted.append(([p[i] / total for i in chosen], chosen))
    same(weights, ids, wanted)


@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid(renormalize: bool) -> None:
    torch.manual_seed(2)
    gating, bias = torch.randn(6, 10), torch.randn(10)
    weights, ids = outputs(6, 3)
    ops.topk_sigmoid(weights, ids, gating, renormalize, bias)
    wanted = []
    for row in gating.tolist():
        s = [sigmoid(value) for value in row]
        chosen = best([a + b for a, b in zip(s, bias.tolist(), strict=True)], 3)
        total = sum(s[i] for i in chosen) if renormalize else 1.0
        wanted.append(([s[i] / total for i in chosen], chosen))
    same(weights, ids, wanted)
    kimi = ops.kimi_k2_moe_fused_gate(gating, bias, 3, renormalize, 2.0, True)
    assert torch.equal(kimi[1], ids)
    assert torch.equal(kimi[0], weights * 2 if renormalize else weights)


def test_equals_come_in_order_and_nan_last() -> None:
    weights, ids = outputs(2, 5)
    gating = torch.tensor([[1.0, 2, 1, 2, 1, 0], [torch.nan, 1, 1, torch.nan, 1, 3]])
    ops.topk_sigmoid(weights, ids, gating)
    assert ids.tolist() == [[1, 3, 0, 2, 4], [5, 1, 2, 4, 0]]
    ops.topk_softmax(weights[:1], ids[:1], gating[:1])
    assert ids[0].tolist() == [1, 3, 0, 2, 4]


def grouped(gating: Tensor, bias: Tensor, groups: int, kept: int, topk: int) -> list[list[int]]:
    found = []
    for row in gating.tolist():
        ranks = [sigmoid(x) + b for x, b in zip(row, bias.tolist(), strict=True)]
        found.append(best(ranks, topk, in_groups(ranks, groups, kept, 2)))
    return found


@pytest.mark.parametrize("groups, kept, topk", [(1, 1, 5), (4, 2, 6), (6, 3, 2), (12, 5, 5)])
def test_groups(groups: int, kept: int, topk: int) -> None:
    torch.manual_seed(groups)
    gating, bias = torch.randn(20, 12), torch.randn(12)
    chosen = grouped(gating, bias, groups, kept, topk)
    s = gating.double().sigmoid()
    raw = [[float(s[t, e]) for e in own] for t, own in enumerate(chosen)]
    whole = [[x / sum(row) for x in row] for row in raw]
    scaled = [[2.5 * x for x in row] for row in whole]
    given = (gating, bias, groups, kept, topk)
    same(*ops.moe_fused_gate(*given), list(zip(whole, chosen, strict=True)))
    applied = ops.moe_fused_gate(*given, 0, 2.5, True)
    for found in (ops.grouped_topk(*given, True, 2.5), applied):
        same(*found, list(zip(scaled, chosen, strict=True)))
    found = ops.biased_grouped_topk(gating, bias, topk, False, groups, kept)
    same(*found, list(zip(raw, chosen, strict=True)))
    found = ops.biased_grouped_topk(gating, bias, topk, True, groups, kept, 2.5)
    same(*found, list(zip(scaled, chosen, strict=True)))


def test_groups_by_softmax_count_by_their_best() -> None:
    gating = torch.tensor([[3.0, -9, 2, 2, 2.5, 2.5, 0, 0]])
    weights, ids = ops.grouped_topk_softmax(gating, 3, False, 4, 2)
    assert ids.tolist() == [[0, 4, 5]]
    torch.testing.assert_close(weights, torch.softmax(gating, -1)[:, ids[0].long()])
    weights, _ = ops.grouped_topk_softmax(gating, 3, True, 4, 2)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_shared_experts_follow_the_routed_ones() -> None:
    gating, bias = torch.randn(5, 8), torch.randn(8)
    weights, ids = ops.moe_fused_gate(gating, bias, 2, 1, 4, 2, 2.5)
    alone, chosen = ops.moe_fused_gate(gating, bias, 2, 1, 2)
    assert torch.equal(ids[:, :2], chosen) and ids[:, 2:].tolist() == [[8, 9]] * 5
    torch.testing.assert_close(weights, torch.cat((alone, torch.full((5, 2), 0.4)), 1))
    scaled, _ = ops.moe_fused_gate(gating, bias, 2, 1, 4, 2, 2.5, True)
    torch.testing.assert_close(scaled, weights * 2.5)


def test_the_other_score_and_raw_weights() -> None:
    gating, bias = torch.randn(5, 8), torch.zeros(8)
    weights, ids = ops.moe_fused_gate(
        gating, bias, 1, 1, 3, scoring_func="sqrtsoftplus", renormalize=False
    )
    scores = torch.log1p(gating.exp()).sqrt()
    torch.testing.assert_close(weights, scores.gather(1, ids.long()))
    assert torch.equal(ids.long(), scores.topk(3).indices)


def test_the_gate_ranks_in_the_dtype_of_its_input() -> None:
    # 0.5 and 0.5 + 2^-10 become equal when 1 is added in bfloat16, so the lower index is first.
    half = torch.bfloat16
    gating = torch.tensor([[0.0, 0.015625]], dtype=half)
    bias = torch.ones(2, dtype=half)
    assert ops.moe_fused_gate(gating, bias, 1, 1, 1)[1].tolist() == [[0]]
    assert ops.grouped_topk(gating, bias, 1, 1, 1, True, 1.0)[1].tolist() == [[1]]


def test_wrong_arguments_are_named() -> None:
    gating, bias = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(BadArgument, match="`num_expert_group` is 3: 8 experts"):
        ops.moe_fused_gate(gating, bias, 3, 1, 2)
    with pytest.raises(BadArgument, match="`topk` is 5, not a number from 0 to 4"):
        ops.grouped_topk(gating, bias, 4, 2, 5, True, 1.0)
    with pytest.raises(BadArgument, match="`routed_scaling_factor` is 0, but it is used"):
        ops.moe_fused_gate(gating, bias, 2, 1, 2, 1)
    with pytest.raises(BadArgument, match="there are 8 experts"):
        ops.topk_softmax(*outputs(2, 9), gating)
