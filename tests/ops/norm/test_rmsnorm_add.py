"""rmsnorm_add against float64, with one rounding after the sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import rmsnorm_add

ON_CPU = [name for name, one in rmsnorm_add.implementations.items() if "cpu" in one.devices]


def added(x: Tensor, residual: Tensor, weight: Tensor, name: str) -> Tensor:
    residual = residual.clone()
    assert rmsnorm_add.using(name)(x, residual, weight, 1e-7) is None
    return residual


@pytest.mark.parametrize("name", ["reference", *ON_CPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 64, 257])
def test_the_sum_is_rounded_once(width: int, dtype: torch.dtype, name: str) -> None:
    g = torch.Generator().manual_seed(width)
    x, residual, weight = (torch.randn(n, width, generator=g).to(dtype) for n in (40, 40, 1))
    scale = 1 / (x.double().square().mean(-1, keepdim=True) + 1e-7).sqrt()
    expected = residual.double() + x.double() * scale * weight.double()
    half_unit = torch.finfo(dtype).eps / 2
    for weights in (weight[0], weight[0].float()):
        got = added(x, residual, weights, name).double()
        torch.testing.assert_close(got, expected, rtol=half_unit * 1.01, atol=4e-6)


@pytest.mark.parametrize("name", ["reference", *ON_CPU])
def test_the_addend_may_overflow_the_dtype(name: str) -> None:
    # For 4, 0, 0, 0 the first normed element is 2.
    x = torch.tensor([[4.0, 0.0, 0.0, 0.0]]).half()
    weight, residual = torch.full((4,), 40000.0).half(), torch.full((1, 4), -30000.0).half()
    wanted = torch.tensor([[50000.0, -30000.0, -30000.0, -30000.0]]).half()
    assert torch.equal(added(x, residual, weight, name), wanted)
