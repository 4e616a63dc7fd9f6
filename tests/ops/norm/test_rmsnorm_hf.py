"""rmsnorm_hf is bitwise equal to the norm of transformers."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import rmsnorm, rmsnorm_hf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 63, 100, 1000])
def test_against_transformers(width: int, dtype: torch.dtype) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(width)
    norm = Qwen3RMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(50, width).to(dtype)
    with torch.no_grad():
        assert torch.equal(rmsnorm_hf(x, norm.weight.data, 1e-5), norm(x))


def test_rounds_before_the_weight() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 64).to(torch.bfloat16)
    weight = torch.full((64,), 1.0 + 2.0**-7, dtype=torch.bfloat16)
    assert not torch.equal(rmsnorm_hf(x, weight), rmsnorm(x, weight))
