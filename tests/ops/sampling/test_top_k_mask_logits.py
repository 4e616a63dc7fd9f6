"""top_k_mask_logits against a loop over sorted Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops import top_k_mask_logits
from cairn.ops.sampling.top_k_mask_logits import top_k_mask
from tests.ops.sampling.variants import interpreted, runnable_on

INF, NAN = math.inf, math.nan


def oracle(row: list[float], k: int) -> list[float]:
    if k < 1 or k >= len(row):
        return row
    least = sorted(row, reverse=True)[k - 1]
    return [x if x >= least else -INF for x in row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 63, 100, 1000])
def test_every_k(width: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(width)
    logits = (3 * torch.randn(6, width)).to(dtype)
    k = torch.tensor([1, 2, width // 2, width - 1, width, 0])
    expected = [oracle(r, n) for r, n in zip(logits.tolist(), k.tolist(), strict=True)]
    for name in runnable_on(top_k_mask, device):
        if dtype == torch.bfloat16 and interpreted(name, device):
            continue
        got = top_k_mask.using(name)(logits.to(device), k.to(device))
        assert got.dtype == dtype
        assert got.tolist() == expected, name


def test_ties_signs_and_infinities(device: str) -> None:
    rows = [
        [1.0, 2.0, 2.0, 2.0, 0.0],
        [-0.0, 0.0, -1.0, -2.0, -3.0],
        [-1e-45, 1e-45, -5.0, 0.0, -1.0],
        [INF, -INF, INF, 1.0, 2.0],
        [-INF, -INF, -INF, -INF, 3.0],
        [-3e38, 3e38, -3e38, 1.0, 2.0],
    ]
    k = torch.tensor([2, 1, 2, 3, 2, 3], dtype=torch.int32, device=device)
    logits = torch.tensor(rows, device=device)
    expected = [oracle(row, n) for row, n in zip(logits.tolist(), k.tolist(), strict=True)]
    for name in runnable_on(top_k_mask, device):
        assert top_k_mask.using(name)(logits, k).tolist() == expected, name


def test_nan_is_never_kept(device: str) -> None:
    logits = torch.tensor([[NAN, 1.0, 2.0, 0.0], [NAN, NAN, 1.0, 0.0]], device=device)
    for name in runnable_on(top_k_mask, device):
        masked = top_k_mask.using(name)(logits, torch.tensor([2, 2], device=device))
        assert masked.tolist() == [[-INF, -INF, 2.0, -INF], [-INF] * 4], name


def test_nan_in_a_line_of_low_logits_counts(device: str) -> None:
    torch.manual_seed(3)
    rows = torch.randn(2, 2000)
    rows[0, [3, 700, 1999]] = NAN
    rows[1, 5:25] = 9.0
    k = torch.tensor([10, 12])
    # Three of the ten are NaN; twenty are equal to the twelfth.
    least = [rows[0].nan_to_num(-9).sort(descending=True).values[6], torch.tensor(9.0)]
    expected = [torch.where(row >= x, row, -INF) for row, x in zip(rows, least, strict=True)]
    for name in runnable_on(top_k_mask, device):
        got = top_k_mask.using(name)(rows.to(device), k.to(device))
        assert torch.equal(got.cpu(), torch.stack(expected)), name


def test_a_number_stands_for_every_row(device: str) -> None:
    logits = torch.randn(4, 50, device=device)
    each = torch.full((4,), 7, device=device)
    assert torch.equal(top_k_mask_logits(logits, 7), top_k_mask_logits(logits, each))
