"""fused_add_rmsnorm against float64, and its two roundings."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import fused_add_rmsnorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 64, 257])
def test_sum_and_norm(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(4, width).to(dtype), torch.randn(4, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    total = x.double() + residual.double()
    scale = 1 / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = total * scale * weight.double()
    assert fused_add_rmsnorm(x, residual, weight) is None
    assert torch.equal(residual, total.to(dtype))
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(x.double(), expected, rtol=half_unit * 1.01 + 1e-6, atol=1e-6)


def test_norm_sees_the_sum_before_it_is_rounded() -> None:
    # 256 + 0.75 rounds to 256 in bfloat16 (spacing 2), as 256 + 0 is; only the norms can differ.
    half = torch.bfloat16
    x = torch.tensor([[0.875, 0.875]], dtype=half)
    residual = torch.tensor([[256.0, 1.0]], dtype=half)
    weight = torch.tensor([1.0, 100.0], dtype=half)
    rounded = (x.float() + residual.float()).to(half).float()
    exact = x.double() + residual.double()
    fused_add_rmsnorm(x, residual, weight, 0.0)
    expected = exact / exact.square().mean(-1, keepdim=True).sqrt() * weight.double()
    naive = rounded / rounded.square().mean(-1, keepdim=True).sqrt() * weight.float()
    assert torch.equal(x, expected.to(half))
    assert not torch.equal(x, naive.to(half))
