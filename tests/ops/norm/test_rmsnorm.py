"""rmsnorm against a loop in Python floats (float64)."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops import rmsnorm


def oracle(x: list[float], weight: list[float], eps: float) -> list[float]:
    scale = 1 / math.sqrt(math.fsum(v * v for v in x) / len(x) + eps)
    return [v * scale * w for v, w in zip(x, weight, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 63, 64, 65, 129, 1000])
def test_every_width(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    expected = torch.tensor([oracle(row, weight.tolist(), 1e-5) for row in x.tolist()])
    # One rounding: half a unit in the last place of the dtype, and little of float32's own error.
    half_unit = torch.finfo(dtype).eps / 2
    for weights in (weight, weight.float()):
        got = rmsnorm(x, weights, 1e-5)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=half_unit * 1.01 + 1e-6, atol=1e-6)


def test_large_values_do_not_overflow_half_precision() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    assert torch.equal(rmsnorm(x, torch.ones(8, dtype=torch.float16)), torch.ones_like(x))


def test_rows_are_independent_and_out_may_be_input() -> None:
    x, weight = torch.randn(5, 33), torch.randn(33)
    whole = rmsnorm(x, weight)
    for row in range(5):
        assert torch.equal(rmsnorm(x[row], weight), whole[row])
    assert rmsnorm(x, weight, out=x) is x
    assert torch.equal(x, whole)


def test_zero_row_stays_zero() -> None:
    assert torch.equal(rmsnorm(torch.zeros(2, 4), torch.ones(4)), torch.zeros(2, 4))
