"""Gemma's norms against float64; stored weights are weight - 1, or weight minus a shift."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import gemma4_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 63, 100, 1000])
def test_norm(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    wide = x.double()
    scale = 1 / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = wide * scale * (1 + weight.double())
    half_unit = torch.finfo(dtype).eps / 2
    for weights in (weight, weight.float()):
        got = gemma_rmsnorm(x, weights, 1e-5)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=half_unit * 1.01 + 1e-6, atol=1e-6)


def test_one_is_added_in_float32() -> None:
    # In bfloat16 1 + 2^-9 is 1.
    half = torch.bfloat16
    x, weight = torch.ones(1, 4, dtype=half), torch.full((4,), -1 + 2.0**-8, dtype=half)
    assert torch.equal(gemma_rmsnorm(x, weight, 0.0), torch.full((1, 4), 2.0**-8, dtype=half))


def test_zero_weight_is_the_plain_norm_of_ones() -> None:
    x = torch.randn(5, 33)
    assert torch.equal(gemma_rmsnorm(x, torch.zeros(33)), rmsnorm.reference(x, torch.ones(33)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 63, 100])
def test_sum_and_norm(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(4, width).to(dtype), torch.randn(4, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    total = x.double() + residual.double()
    scale = 1 / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = total * scale * (1 + weight.double())
    assert gemma_fused_add_rmsnorm(x, residual, weight) is None
    assert torch.equal(residual, total.to(dtype))
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(x.double(), expected, rtol=half_unit * 1.01 + 1e-6, atol=1e-6)


def test_gemma4_adds_its_shift_or_leaves_the_weight_out() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 50), torch.randn(50)
    plain = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    for shift in (0.0, 1.0):
        wanted = plain * (weight.double() + shift)
        torch.testing.assert_close(gemma4_rmsnorm(x, weight, 1e-5, shift, True).double(), wanted)
    bare = gemma4_rmsnorm(x, weight, 1e-5, 1.0, False)
    torch.testing.assert_close(bare.double(), plain)
    assert torch.equal(bare, gemma4_rmsnorm(x, None, 1e-5, with_scale=False))
    assert torch.equal(gemma4_rmsnorm(x, weight, scale_shift=1.0), gemma_rmsnorm(x, weight))
