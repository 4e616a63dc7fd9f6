"""gelu activations against math.erf and math.tanh, and rows without an expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cairn.ops import gelu_and_mul, gelu_quick, gelu_tanh_and_mul, silu_and_mul
from tests.ops.sampling.variants import runnable_on


def erf_form(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def tanh_form(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def assert_rows(got: torch.Tensor, expected: list[list[float]], dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    half_unit = torch.finfo(dtype).eps / 2
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got.double(), wanted, rtol=half_unit * 1.01 + 2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 63, 100])
@pytest.mark.parametrize("op, form", [(gelu_and_mul, erf_form), (gelu_tanh_and_mul, tanh_form)])
def test_gated(op: Any, form: Callable[[float], float], width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (3 * torch.randn(5, 2 * width)).to(dtype)
    expected = [
        [form(g) * u for g, u in zip(row[:width], row[width:], strict=True)] for row in x.tolist()
    ]
    assert_rows(op(x), expected, dtype)


@pytest.mark.parametrize("name", runnable_on(gelu_and_mul, "cpu"))
def test_exact_gelu_keeps_its_digits_far_below_zero(name: str) -> None:
    x = torch.linspace(-12.0, 12.0, 4001)
    wanted = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.tolist()]
    got = gelu_and_mul.using(name)(torch.cat((x, torch.ones_like(x))))
    torch.testing.assert_close(
        got.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-37
    )
    ends = torch.tensor([math.inf, math.nan, 0.0, -0.0, 1.0, 1.0, 1.0, 1.0])
    at_ends = gelu_and_mul.using(name)(ends)
    assert at_ends[0] == math.inf and at_ends[1].isnan() and at_ends[2] == at_ends[3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_quick_against_the_formula(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(5, 63)).to(dtype)
    expected = [[v / (1 + math.exp(-1.702 * v)) for v in row] for row in x.tolist()]
    assert_rows(gelu_quick(x), expected, dtype)
    assert gelu_quick(x, out=x) is x
    assert_rows(x, expected, dtype)


@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul, gelu_tanh_and_mul])
def test_steering_a_launch_changes_nothing(op: Any) -> None:
    x = torch.randn(5, 14)
    assert torch.equal(op(x, enable_pdl=True), op(x))
    assert torch.equal(op(x, None, True), op(x))


@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul, gelu_tanh_and_mul])
def test_rows_of_no_expert_are_left_alone(op: Any) -> None:
    x, out = torch.randn(5, 14), torch.full((5, 7), 9.0)
    whole = op(x)
    ids = torch.tensor([3, -1, 0], dtype=torch.int32)
    assert op(x, out, expert_ids=ids, expert_step=2) is out
    torch.testing.assert_close(out[[0, 1, 4]], whole[[0, 1, 4]])
    assert bool((out[2:4] == 9.0).all())
