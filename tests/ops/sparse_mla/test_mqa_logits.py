"""Scores of the indexer against a loop over tokens, heads and keys in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import index_k_gather, paged_mqa_logits, ragged_mqa_logits
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.sparse_mla import index_cache
from cairn.ops.sparse_mla.paged_mqa_logits import paged_mqa_logits_into
from cairn.ops.sparse_mla.ragged_mqa_logits import ragged_mqa_logits_into
from cairn.ops.testing import Make, Paged

SIZE, DIM = 16, 32


def expected(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """[T, L] float64 of q [T, Hi, D] and keys [L, D]."""
    dots = torch.einsum("thd,ld->thl", q.double(), k.double())
    return torch.einsum("thl,th->tl", dots.clamp(min=0), weights.double())


def unlike(one: Tensor, other: Tensor) -> float:
    """0 for equal scores."""
    return float(1 - 2 * (one * other).sum() / (one**2 + other**2).sum())


def step(heads: int, device: str, counts: tuple[int, ...]) -> tuple[Paged, Tensor, ...]:
    make = Make(device)
    paged = make.paged((75, 16, 0, 33), 1, SIZE, DIM)
    row, slot, _ = paged.queries(counts)
    q, weights = make.randn(len(row), heads, DIM), make.randn(len(row), heads)
    return paged, q, weights, row, (slot + 1).to(torch.int32)


def visible(logits: Tensor, context: Tensor) -> Tensor:
    """Scores of visible keys; unwritten ones are set to 0."""
    column = torch.arange(logits.shape[1], device=logits.device)
    return logits.where(column < context.unsqueeze(1), 0.0)


def keys_of(paged: Paged, row: int, count: int) -> Tensor:
    """The first keys of a row, contiguous."""
    return paged.k_cache[paged.page_table[row].long(), 0].flatten(0, 1)[:count]


@pytest.mark.parametrize("counts", [(1, 1, 0, 1), (4, 2, 0, 3), (75, 0, 0, 1)])
@pytest.mark.parametrize("heads", [1, 32, 64])
def test_paged_against_float64(heads: int, counts: tuple[int, ...], device: str) -> None:
    paged, q, weights, row, context = step(heads, device, counts)
    cache, table = paged.k_cache[:, 0], paged.page_table
    logits = paged_mqa_logits(q, weights, cache, table, row, context)
    assert logits.dtype == torch.float32
    assert logits.shape == (len(row), table.shape[1] * SIZE)
    short = paged_mqa_logits(q, weights, cache, table, row, context, width=75)
    for t, (r, count) in enumerate(zip(row.tolist(), context.tolist(), strict=True)):
        wanted = expected(q[t : t + 1], weights[t : t + 1], keys_of(paged, r, count))[0]
        torch.testing.assert_close(logits[t, :count].double(), wanted, rtol=1e-5, atol=1e-4)
        if device == "cpu":  # libraries for GPUs choose a way by the number of products
            assert torch.equal(short[t, :count], logits[t, :count])


@pytest.mark.parametrize("preshuffled", [False, True])
def test_quantized_keys(preshuffled: bool, device: str) -> None:
    paged, q, weights, row, context = step(8, device, (20, 1, 0, 3))
    cache = index_cache.pack(paged.k_cache[:, 0], preshuffled, scale_ue8m0=True)
    table, where = paged.page_table, (row, context)
    q8, q_scale = index_cache.quantize(q, scale_ue8m0=False)
    folded = weights * q_scale
    logits = paged_mqa_logits(q8, folded, cache, table, *where, preshuffled=preshuffled)
    for t, (r, count) in enumerate(zip(*(x.tolist() for x in where), strict=True)):
        slot = torch.arange(count, device=device)
        location = table[r].long()[slot // SIZE] * SIZE + slot % SIZE
        numbers, scale = index_k_gather(cache, location, DIM, preshuffled)
        worth = numbers.double() * scale.double()[:, None]
        wanted = expected(q8[t : t + 1].float(), folded[t : t + 1], worth)[0]
        apart = (logits[t, :count].double() - wanted).abs()
        if device == "cpu":
            assert float((apart - 1e-5 * wanted.abs()).max()) < 1e-4
        else:
            # Hopper's tensor cores accumulate float8 products with 14 bits.
            parts = (q8[t : t + 1].float().abs(), folded[t : t + 1].abs(), worth.abs())
            assert bool((apart <= expected(*parts)[0] * 2**-13).all())
            assert unlike(logits[t, :count].double(), wanted) < 5e-6
        begin = torch.zeros(1, dtype=torch.int32, device=device)
        own = slice(t, t + 1)
        side = ragged_mqa_logits(q8[own], folded[own], numbers, scale, begin, begin + count)
        torch.testing.assert_close(side[0], logits[t, :count], rtol=1e-5, atol=1e-5)
        exact = expected(q[own], weights[own], keys_of(paged, r, count))[0]
        # For few keys and dims; for 128 dims and thousands of keys it is 6e-4.
        assert unlike(exact, wanted) < 1e-2


def test_tokens_without_keys_read_and_write_nothing(device: str) -> None:
    paged, q, weights, row, context = step(4, device, (3, 0, 0, 0))
    context[:] = torch.tensor([0, -1, -(1 << 31)])
    cache = torch.full_like(paged.k_cache[:, 0], math.nan)
    wild = torch.full_like(paged.page_table, 1 << 30)
    logits = torch.ones(3, 8, device=device)
    paged_mqa_logits_into(q, weights, cache, wild, row, context, logits)
    start = torch.tensor([5, 7, 100], dtype=torch.int32, device=device)
    end = torch.tensor([5, 0, -1], dtype=torch.int32, device=device)
    ragged_mqa_logits_into(q, weights, cache[0], None, start, end, logits, compact=True)
    assert bool((logits == 1).all())


@pytest.mark.parametrize("chunked", [False, True])
def test_only_scores_that_are_asked_for_are_written(chunked: bool, device: str) -> None:
    """Tokens with at most topk keys get no scores, and the output is not filled first."""
    paged, q, weights, row, context = step(4, device, (30, 9, 0, 3))
    given = (q, weights, paged.k_cache[:, 0], paged.page_table, row, context)
    whole = visible(paged_mqa_logits(*given), context)
    logits = torch.full_like(whole, 7.0)
    paged_mqa_logits_into(*given, logits, least=50, chunked=chunked)
    column = torch.arange(logits.shape[1], device=device)
    scored = (column < context.unsqueeze(1)) & (context > 50).unsqueeze(1)
    torch.testing.assert_close(logits, whole.where(scored, 7.0), rtol=1e-5, atol=1e-5)


def test_zero_queries_scales_and_weights(device: str) -> None:
    make = Make(device)
    q, k = make.randn(3, 4, DIM), make.randn(9, DIM)
    q[0] = 0
    weights, scale = -make.rand(3, 4), make.rand(9)
    scale[4] = 0
    start = torch.zeros(3, dtype=torch.int32, device=device)
    logits = ragged_mqa_logits(q, weights, k, scale, start, start + 9)
    assert not logits[0].any() and not logits[:, 4].any()
    assert bool((logits <= 0).all()) and bool((logits[1:] < 0).any())


def test_nan_of_one_query_or_key_stays_there(device: str) -> None:
    paged, q, weights, row, context = step(4, device, (9, 0, 0, 2))
    given = (weights, paged.k_cache[:, 0], paged.page_table, row, context)
    before = visible(paged_mqa_logits(q, *given), context)
    q[4, 1] = math.nan
    after = visible(paged_mqa_logits(q, *given), context)
    others = torch.arange(len(row), device=device) != 4
    assert torch.equal(after[others], before[others])
    page, offset = int(paged.page_table[0, 1]), 5
    paged.k_cache[page, 0, offset] = math.nan
    after = visible(paged_mqa_logits(q, *given), context)[:4]
    assert bool(after[:, SIZE + offset].isnan().all())
    kept = torch.arange(after.shape[1], device=device) != SIZE + offset
    assert torch.equal(after[:, kept], before[:4, kept])


def test_compact_columns_start_at_the_first_key(device: str) -> None:
    make = Make(device)
    q, weights, k = make.randn(4, 3, DIM), make.randn(4, 3), make.randn(40, DIM)
    start = torch.tensor([0, 8, 30, 40], dtype=torch.int32, device=device)
    end = torch.tensor([10, 9, 40, 40], dtype=torch.int32, device=device)
    whole = ragged_mqa_logits(q, weights, k, None, start, end)
    compact = ragged_mqa_logits(q, weights, k, None, start, end, width=10)
    assert compact.shape == (4, 10)
    for t, (low, high) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        assert torch.equal(compact[t, : high - low], whole[t, low:high])


def test_blocks_of_queries_do_not_show() -> None:
    paged, q, weights, row, context = step(16, "cpu", (75, 16, 0, 33))
    given = (q, weights, paged.k_cache[:, 0], paged.page_table, row, context)
    ragged = (q, weights, paged.k_cache[paged.page_table[0].long(), 0].flatten(0, 1)[:75], None)
    ends = (torch.zeros_like(context), context)
    wanted = [
        visible(found, context)
        for found in (paged_mqa_logits(*given), ragged_mqa_logits(*ragged, *ends))
    ]
    for size in (1, 100_000):
        with ATTENTION_TUNING.replaced(paging_block_bytes=size):
            assert torch.equal(visible(paged_mqa_logits(*given), context), wanted[0])
            assert torch.equal(visible(ragged_mqa_logits(*ragged, *ends), context), wanted[1])


def test_wrong_arguments_are_named() -> None:
    paged, q, weights, row, context = step(4, "cpu", (3, 0, 0, 0))
    given = (q, weights, paged.k_cache[:, 0], paged.page_table)
    with pytest.raises(BadArgument, match="`context` holds 75, not numbers up to 74"):
        paged_mqa_logits(*given, row, context, width=74)
    with pytest.raises(BadArgument, match="`row` holds 4, not numbers from 0 to 3"):
        paged_mqa_logits(*given, row + 4, context)
    with pytest.raises(BadArgument, match="`width` is 1000, not 0 to the"):
        paged_mqa_logits(*given, row, context, width=1000)
    k, start = torch.zeros(9, DIM), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(BadArgument, match="`end` holds 10, not numbers up to 9"):
        ragged_mqa_logits(q, weights, k, None, start, start + 10)
    with pytest.raises(BadArgument, match="`width` holds 9, not numbers from 0 to 5"):
        ragged_mqa_logits(q, weights, k, None, start, start + 9, width=5)
