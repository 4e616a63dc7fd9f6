"""score_tokens against float64, and rows with NaN or infinities."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops import score_tokens
from cairn.ops.sampling.score_tokens import CHUNK
from tests.ops.sampling.variants import runnable_on

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("width", [1, 7, 1000, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_logprobs_and_ranks(width: int, device: str) -> None:
    torch.manual_seed(width)
    logits = torch.randn(5, width) * 4
    logits[1] = logits[1].round()
    logits[2] += 300.0
    tokens = torch.randint(0, width, (5,))
    tokens[3] = width - 1
    wide = logits.double()
    expected = torch.log_softmax(wide, -1).gather(1, tokens[:, None])[:, 0]
    larger = (wide > wide.gather(1, tokens[:, None])).sum(-1)
    for name in runnable_on(score_tokens, device):
        score = score_tokens.using(name)
        peak, log_sum, rank = (x.cpu() for x in score(logits.to(device), tokens.to(device)))
        assert torch.equal(peak, logits.amax(-1)), name
        own = logits.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close((own - peak - log_sum).double(), expected, atol=4e-6, rtol=1e-6)
        assert rank.tolist() == (larger + 1).tolist(), name


def test_probabilities_near_1_keep_their_digits(device: str) -> None:
    logits = torch.zeros(1, 2 * CHUNK, device=device)
    logits[0, 5] = 22.0
    token = torch.tensor([5], device=device)
    exact = -math.log1p((2 * CHUNK - 1) * math.exp(-22.0))
    for name in runnable_on(score_tokens, device):
        peak, log_sum, rank = score_tokens.using(name)(logits, token)
        assert float(22.0 - peak - log_sum) == pytest.approx(exact, abs=7e-8), name
        assert rank.tolist() == [1]


@pytest.mark.parametrize("at", [0, CHUNK, 2 * CHUNK])
def test_rows_with_what_is_no_number(at: int, device: str) -> None:
    logits = torch.randn(5, 2 * CHUNK + 3)
    logits[0] = -INF
    logits[1, at] = NAN
    logits[2, at] = INF
    logits[3, at : at + CHUNK] = -INF
    logits[4] = -INF
    logits[4, at] = 2.0
    tokens = torch.full((5,), at)
    for name in runnable_on(score_tokens, device):
        score = score_tokens.using(name)
        peak, log_sum, rank = (x.cpu() for x in score(logits.to(device), tokens.to(device)))
        assert peak[0] == -INF and peak[1].isnan() and peak[2] == INF and peak[4] == 2.0, name
        assert log_sum[:3].isnan().all() and log_sum[4] == 0.0, name
        assert log_sum[3] == pytest.approx(float(torch.logsumexp(logits[3], 0) - peak[3]), abs=1e-5)
        larger = [0, 0, 0, int((logits[3] > -INF).sum()), 0]
        assert rank.tolist() == [1 + n for n in larger], name


def test_rows_of_a_wider_tensor_and_none(device: str) -> None:
    wide = torch.randn(3, 700, device=device)
    wide[:, 600:] = 100.0
    tokens = torch.tensor([0, 599, 7], device=device)
    expected = score_tokens.reference(wide[:, :600].clone(), tokens)
    for name in runnable_on(score_tokens, device):
        score = score_tokens.using(name)
        for got, want in zip(score(wide[:, :600], tokens), expected, strict=True):
            torch.testing.assert_close(got, want, msg=name)
        assert [x.shape for x in score(wide[:0], tokens[:0])] == [(0,)] * 3, name


def test_a_row_is_scored_alike_among_others(device: str) -> None:
    logits = torch.randn(9, 5000, device=device) * 5
    tokens = torch.randint(0, 5000, (9,), device=device)
    # Skip the definition, whose order of summation is PyTorch's.
    for name in runnable_on(score_tokens, device)[1:]:
        score = score_tokens.using(name)
        together = score(logits, tokens)
        for i in range(9):
            alone = score(logits[i : i + 1], tokens[i : i + 1])
            assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True)), name
