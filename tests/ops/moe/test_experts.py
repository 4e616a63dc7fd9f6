"""Expert products against float64 loops over tokens, with permutation and reduction of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn import ops

ACTS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def by_hand(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, act: str, on_input: bool
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for share, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
            if e >= 0:
                row = x[t].double() * (share if on_input else 1)
                gate, up = (w1[e].double() @ row).chunk(2)
                out[t] += (w2[e].double() @ (ACTS[act](gate) * up)) * (1 if on_input else share)
    return out


@pytest.mark.parametrize("way", ["reference", "torch"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("on_input", [False, True])
def test_sum_of_experts(act: str, on_input: bool, way: str) -> None:
    torch.manual_seed(3)
    x, w1, w2 = torch.randn(11, 12), torch.randn(7, 16, 12), torch.randn(7, 12, 8)
    # One expert has no token, and one a token twice.
    ids = torch.randint(-1, 6, (11, 3), dtype=torch.int32)
    ids[0] = 5
    w1[6] = torch.nan
    weights = torch.rand(11, 3)
    wanted = 2.5 * by_hand(x, w1, w2, weights, ids, act, on_input)
    got = ops.fused_experts.using(way)(x, w1, w2, weights, ids, act, on_input, 2.5)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_a_half_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x, w1 = torch.randn(9, 32).to(dtype), (torch.randn(5, 48, 32) / 6).to(dtype)
    w2, weights = (torch.randn(5, 32, 24) / 5).to(dtype), torch.rand(9, 2)
    ids = torch.randint(0, 5, (9, 2))
    wanted = by_hand(x, w1, w2, weights, ids, "silu", False)
    got = ops.fused_experts(x, w1, w2, weights, ids)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_blocks(block: int, pad: bool) -> None:
    torch.manual_seed(block)
    experts, tokens, topk = 6, 13, 3
    ids = torch.randint(-1, experts - 1, (tokens, topk), dtype=torch.int32)
    most = tokens * topk + (experts + 1) * (block - 1)
    order = torch.full((most,), -5, dtype=torch.int32)
    owner = torch.full((-(-most // block),), -5, dtype=torch.int32)
    total, ends = torch.zeros(1, dtype=torch.int32), torch.zeros(experts + 2, dtype=torch.int32)
    ops.moe_align_block_size(ids, experts + 1, block, order, owner, total, ends, pad)
    flat, wanted, owners = ids.flatten().tolist(), [], []
    for e in range(-1, experts):
        own = [place for place, found in enumerate(flat) if found == e]
        blocks = -(-len(own) // block)
        wanted += own + [tokens * topk if pad else -5] * (blocks * block - len(own))
        owners += [e] * blocks
    assert int(total) == len(wanted) == int(ends[-1])
    rest = tokens * topk if pad else -5
    assert order.tolist() == wanted + [rest] * (most - len(wanted))
    assert owner[: len(owners)].tolist() == owners


def test_gathered_rows_come_back() -> None:
    torch.manual_seed(5)
    tokens, topk, experts = 9, 2, 4
    ids = torch.randint(0, experts - 1, (tokens, topk), dtype=torch.int32)

    def words(*shape: int) -> Tensor:
        return torch.full(shape, -9, dtype=torch.int32)

    offsets, scales = words(experts + 1), words(experts + 1)
    first, second = words(experts, 3), words(experts, 3)
    there, back = words(tokens * topk), words(tokens * topk)
    ops.prepare_moe_input(ids, offsets, first, second, there, back, experts, 5, 7, scales)
    counts = [ids.flatten().tolist().count(e) for e in range(experts)]
    assert first.tolist() == [[m, 10, 7] for m in counts]
    assert second.tolist() == [[m, 7, 5] for m in counts]
    assert offsets.tolist() == [sum(counts[:e]) for e in range(experts + 1)]
    assert scales.tolist() == [sum(-(-m // 128) * 128 for m in counts[:e]) for e in range(5)]
    x, weights = torch.randn(tokens, 6), torch.rand(tokens * topk)
    rows = ops.shuffle_rows(x, there, [tokens * topk, 6])
    owner = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    out = torch.full((tokens, 6), torch.nan)
    ops.apply_shuffle_mul_sum(rows * (owner[:, None] + 1), out, back, weights)
    share = (weights.view(tokens, topk) * (ids + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(out, x * share)
    ops.apply_shuffle_mul_sum(rows, out, back, None)
    torch.testing.assert_close(out, x * topk)


def test_ids_of_no_expert_take_no_row() -> None:
    ids = torch.tensor([[1, -1], [4, 0]])
    there, back = (torch.full((4,), -9, dtype=torch.int32) for _ in range(2))
    offsets = torch.zeros(5, dtype=torch.int32)
    sizes = [torch.zeros(4, 3, dtype=torch.int32) for _ in range(2)]
    ops.prepare_moe_input(ids, offsets, *sizes, there, back, 4, 5, 7)
    assert there.tolist() == [1, 0, -9, -9] and back.tolist() == [1, -9, -9, 0]
    assert offsets.tolist() == [0, 1, 2, 2, 2]


def test_sums_are_taken_in_float32() -> None:
    x = torch.tensor([256.0, 1, 1], dtype=torch.bfloat16).view(1, 3, 1)
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    assert ops.moe_sum(x, out) is None
    assert out.item() == 258
    ops.moe_sum_reduce(x, out, 0.5)
    assert out.item() == 129
    ops.moe_sum_reduce(x, out)
    assert out.item() == 258
