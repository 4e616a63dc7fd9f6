"""Long rows, whose candidates are listed before the search for the k-th largest."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.ops.select_k.launch import mask_smaller
from cairn.ops.select_k.tuning import TUNING
from tests.ops.tables import Tuned

pytestmark = pytest.mark.usefixtures("launches")
WIDTH = 9_001


def expected(logits: Tensor, top_k: Tensor) -> Tensor:
    """By sorting, NaN first."""
    rows = []
    for row, k in zip(logits, top_k.tolist(), strict=True):
        limited = 1 <= k < len(row)
        least = row.sort(descending=True).values[k - 1 if limited else -1]
        rows.append(torch.where(row >= least, row, -torch.inf) if limited else row)
    return torch.stack(rows)


def assert_masked(logits: Tensor, top_k: Tensor, device: str) -> None:
    got = mask_smaller(logits.to(device), top_k.to(device)).cpu()
    torch.testing.assert_close(got, expected(logits, top_k), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["normal", "equal", "level", "ascending"])
def test_any_k(kind: str, device: str) -> None:
    torch.manual_seed(1)
    rows = torch.randn(6, WIDTH)
    if kind == "equal":
        rows = (rows * 2).round()
    if kind == "level":
        rows.fill_(-2.5)
    if kind == "ascending":
        rows = rows.sort(dim=1).values
    assert_masked(rows, torch.tensor([1, 50, 3_000, WIDTH - 1, 0, WIDTH]), device)


def test_a_sample_that_misses_the_largest(device: str) -> None:
    """The bound is then wrong: more candidates are listed than a program holds, or fewer than k."""
    torch.manual_seed(2)
    rows = torch.zeros(2, WIDTH)
    rows[:, 100:500] = torch.rand(2, 400) + 1
    assert_masked(rows, torch.tensor([300, 450]), device)


def test_nan_and_infinities(device: str) -> None:
    torch.manual_seed(3)
    rows = torch.randn(3, WIDTH)
    rows[:, ::1000] = math.nan
    rows[1, 5:900:7] = math.inf
    rows[2, :4_000] = -math.inf
    for k in (5, 10, 11, 40, 8_000):
        assert_masked(rows, torch.full((3,), k), device)


@pytest.mark.parametrize("dtype", [torch.float16])
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(4)
    assert_masked(torch.randn(2, WIDTH).to(dtype), torch.tensor([7, 2_000]), device)


def test_more_rows_than_a_launch_has(device: str, tuned: Tuned) -> None:
    torch.manual_seed(5)
    tuned(TUNING, mask_rows=2)
    assert_masked(torch.randn(5, 300), torch.tensor([1, 2, 3, 0, 300]), device)
