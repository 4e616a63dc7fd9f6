"""draw_from_probs against a scalar loop and against its distribution."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops import counter_uniform, top_k_renorm_probs
from cairn.ops.sampling.draw_from_probs import draw_from_probs
from tests.ops.sampling.variants import interpreted, runnable_on


def oracle(row: list[float], uniform: float) -> int:
    running, target = 0.0, uniform * math.fsum(row)
    for token, p in enumerate(row):
        running += p
        if running > target:
            return token
    return -1


def test_against_scalars(device: str) -> None:
    # Multiples of 1 / 64: sums are exact in any order, so boundaries are equal.
    torch.manual_seed(0)
    probs = torch.randint(0, 5, (400, 13)).float() / 64
    probs[:, 0] += 1 / 64
    uniform = torch.randint(0, 16, (400,)).float() / 16
    expected = [oracle(r, u) for r, u in zip(probs.tolist(), uniform.tolist(), strict=True)]
    for name in runnable_on(draw_from_probs, device):
        rows = slice(20 if interpreted(name, device) else None)
        got = draw_from_probs.using(name)(probs[rows].to(device), uniform[rows].to(device))
        assert got.dtype == torch.int32
        assert got.tolist() == expected[rows], name


def test_boundaries_between_chunks(device: str) -> None:
    # Probability mass at chunk boundaries of the kernels; the sums are exact.
    places = [0, 511, 512, 1023, 1024, 1299]
    probs = torch.zeros(1, 1300)
    probs[0, places] = 1 / 8
    uniform = (torch.arange(12) / 12).float() + 1e-6
    expected = [places[i // 2] for i in range(12)]
    for name in runnable_on(draw_from_probs, device):
        rows = probs.expand(12, -1).contiguous().to(device)
        got = draw_from_probs.using(name)(rows, uniform.to(device))
        assert got.tolist() == expected, name


@pytest.mark.parametrize(("laws", "k"), [(4, 4), (1, 24)])
def test_each_of_the_top_k_is_drawn_and_no_other(laws: int, k: int, device: str) -> None:
    # Nearly equal probabilities: each token is drawn by one of these uniform numbers.
    torch.manual_seed(k)
    probs = torch.softmax(torch.randn(laws, 3000) * 1e-3, dim=-1)
    expected = probs.topk(k).indices.sort().values
    uniform = ((torch.arange(k) + 0.5) / k).repeat(laws).to(device)
    rows = probs.repeat_interleave(k, 0).to(device)
    top_k = torch.full((laws * k,), k, dtype=torch.int32, device=device)
    for name in runnable_on(draw_from_probs, device):
        got = draw_from_probs.using(name)(rows, uniform, top_k).cpu()
        assert got.view(laws, k).tolist() == expected.tolist(), name


def test_law_of_the_draw() -> None:
    draws = 100_000
    torch.manual_seed(0)
    law = torch.softmax(torch.randn(1, 40), dim=-1)
    law = top_k_renorm_probs(law, torch.tensor([30]))
    uniform = counter_uniform(torch.full((draws,), 99), torch.arange(draws))
    tokens = draw_from_probs(law.expand(draws, -1).contiguous(), uniform)
    counts = torch.bincount(tokens, minlength=40).double()
    expected = law[0].double() * draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 4


def test_tokens_without_mass_are_never_drawn() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    uniform = torch.tensor([0.0, 0.29, 0.3, 0.31, 0.999, 1 - 2.0**-24])
    got = draw_from_probs(probs.expand(6, -1), uniform).tolist()
    assert set(got) == {1, 3}
    assert got[0] == 1
    assert got[-1] == 3


def test_small_tokens_after_a_large_one_keep_their_share() -> None:
    # A float32 running sum above 1 moves in steps of 8 of these tokens, so 7 of 8 would be lost.
    probs = torch.full((1, 1025), 2.0**-26)
    probs[0, 0] = 1.0
    for uniform in (1 - 2.0**-24, 1 - 2.0**-23, 1 - 3 * 2.0**-24):
        got = draw_from_probs(probs, torch.tensor([uniform]))
        assert got.tolist() == [oracle(probs[0].tolist(), uniform)]


def test_rows_without_a_law_give_minus_one(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    probs = torch.tensor([[0.0, 0.0], [nan, 1.0], [1.0, nan], [inf, 1.0], [0.0, 1.0]])
    for name in runnable_on(draw_from_probs, device):
        got = draw_from_probs.using(name)(probs.to(device), torch.full((5,), 0.5).to(device))
        assert got.tolist() == [-1, -1, -1, -1, 1], name


@pytest.mark.parametrize("which", [None, [0, 1, 2, 3, 4, 5]])
def test_filters_do_not_hide_nan(which: list[int] | None, device: str) -> None:
    nan, inf = float("nan"), float("inf")
    row = torch.tensor([nan, 0.5, 0.5])
    rows = torch.stack((row, row, row, row.flip(0), row.nan_to_num(inf), row.nan_to_num(0.0)))
    k = torch.tensor([1, 2, 0, 3, 2, 1], device=device)
    indices = None if which is None else torch.tensor(which, device=device)
    uniform, p = torch.full((6,), 0.5, device=device), torch.full((6,), 0.9, device=device)
    for name in runnable_on(draw_from_probs, device):
        draw = draw_from_probs.using(name)
        for filters in ((k, None, None), (None, p, None), (None, None, p), (k, p, p)):
            got = draw(rows.to(device), uniform, *filters, indices).tolist()
            assert got[:5] == [-1] * 5 and got[5] > 0, name


def test_draws_may_be_far_more_than_rows(device: str) -> None:
    """A copy of the row for each would take 25 GB."""
    torch.manual_seed(0)
    rows, uniform = torch.rand(2, 32_000), torch.rand(100_000)
    which = torch.randint(0, 2, (100_000,))
    running = rows.double().cumsum(-1)
    expected = torch.empty_like(which)
    for row in range(2):
        mine = which == row
        bounds = uniform[mine].double() * running[row, -1]
        expected[mine] = torch.searchsorted(running[row], bounds, right=True)
    got = draw_from_probs(rows.to(device), uniform.to(device), indices=which.to(device))
    assert torch.equal(got.cpu().long(), expected)
