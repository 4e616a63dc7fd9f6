"""argmax_tokens against Python's max."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops import argmax_tokens
from tests.ops.sampling.variants import runnable_on

INF, NAN = math.inf, math.nan


def oracle(row: list[float]) -> int:
    best = max(row, default=-INF)
    return -1 if any(map(math.isnan, row)) or best == -INF else row.index(best)


@pytest.mark.parametrize("width", [1, 2, 33, 1000, 2049])
def test_rows_with_ties_and_without_a_token(width: int, device: str) -> None:
    torch.manual_seed(width)
    logits = torch.randint(-3, 4, (9, width)).float()
    logits[1] = -INF
    logits[2] = -INF
    logits[2, -1] = -7.0
    logits[3, width // 2] = NAN
    logits[4] = NAN
    logits[5, width // 3] = INF
    logits[6, width // 4] = -NAN
    logits[6, -1] = INF
    logits[7] = -0.0
    logits[7, -1] = 0.0
    expected = [oracle(row) for row in logits.tolist()]
    for name in runnable_on(argmax_tokens, device):
        got = argmax_tokens.using(name)(logits.to(device))
        assert got.dtype == torch.int64
        assert got.tolist() == expected, name


def test_the_winner_may_be_anywhere(device: str) -> None:
    width = 1700
    places = [0, 1, 511, 512, 1023, 1024, 1535, 1699]
    logits = torch.randn(len(places), width).clamp(max=3.0)
    for row, place in enumerate(places):
        logits[row, place] = 4.0
        logits[row, place + 1 :: 7] = 4.0
    for name in runnable_on(argmax_tokens, device):
        assert argmax_tokens.using(name)(logits.to(device)).tolist() == places, name


def test_rows_of_a_wider_tensor_and_none(device: str) -> None:
    wide = torch.randn(3, 700, device=device)
    wide[:, 600:] = 100.0
    expected = wide[:, :600].argmax(-1).tolist()
    for name in runnable_on(argmax_tokens, device):
        argmax = argmax_tokens.using(name)
        assert argmax(wide[:, :600]).tolist() == expected, name
        assert argmax(wide[:0]).shape == (0,), name
