"""l2norm, the layernorms and fused_rmsnorm_gated against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import fused_add_layernorm, fused_rmsnorm_gated, l2norm, layernorm


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.double(), wanted, rtol=half_unit * 1.01 + 2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 128, 1000])
def test_norms(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, gate = torch.randn(3, 2, width).to(dtype), torch.randn(3, 2, width).to(dtype)
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    wide = x.double()
    close(l2norm(x, 1e-3), wide / (wide.square().sum(-1, keepdim=True) + 1e-3).sqrt(), dtype)
    scaled = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    act = gate.double() * gate.double().sigmoid()
    close(fused_rmsnorm_gated(x, weight, gate, 1e-3), scaled * act, dtype)
    centred = wide - wide.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    plain = centred / spread * weight.double()
    close(layernorm(x, weight, None, 1e-3), plain, dtype)
    close(layernorm(x, weight, bias, 1e-3), plain + bias.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_add_layernorm_keeps_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(3, 50).to(dtype), torch.randn(3, 50).to(dtype)
    weight, bias = torch.randn(50).to(dtype), torch.randn(50).to(dtype)
    total = x.double() + residual.double()
    centred = total - total.mean(-1, keepdim=True)
    plain = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    fused_add_layernorm(x, residual, weight, bias, 1e-3)
    close(residual, total, dtype)
    close(x, plain * weight.double() + bias.double(), dtype)
