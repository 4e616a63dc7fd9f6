"""In-place query and key norms against a float64 loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import fused_inplace_qknorm, fused_inplace_qknorm_across_heads


def oracle(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = rows.double()
    for row in wide.view(-1, wide.shape[-1]):
        row *= weight.double() / (row.square().sum() / row.numel() + eps).sqrt()
    return wide


def assert_near(got: Tensor, expected: Tensor) -> None:
    half_unit = torch.finfo(got.dtype).eps / 2
    torch.testing.assert_close(got.double(), expected, rtol=half_unit * 1.01 + 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, dim", [(1, 1), (3, 7), (4, 100)])
def test_every_head(heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    joint = torch.randn(5, heads + 3, dim).to(dtype)
    q, k, v = joint[:, :heads], joint[:, heads : heads + 2], joint[:, heads + 2 :]
    weights = torch.randn(dim).to(dtype), torch.randn(dim)
    expected = oracle(q, weights[0], 1e-5), oracle(k, weights[1], 1e-5), v.clone()
    assert fused_inplace_qknorm(q, k, *weights, 1e-5) is None
    assert_near(q, expected[0])
    assert_near(k, expected[1])
    assert torch.equal(v, expected[2])


def test_heads_of_a_flat_projection() -> None:
    q, k, weight = torch.randn(3, 32), torch.randn(3, 16), torch.randn(16)
    expected = oracle(q.view(3, 2, 16), weight, 1e-6), oracle(k.view(3, 1, 16), weight, 1e-6)
    fused_inplace_qknorm(q, k, weight, weight, head_dim=16)
    assert_near(q.view(3, 2, 16), expected[0])
    assert_near(k.view(3, 1, 16), expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_across_heads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    joint = torch.randn(5, 100).to(dtype)
    q, k, v = joint[:, :63], joint[:, 63:70], joint[:, 70:]
    weights = torch.randn(63), torch.randn(7).to(dtype)
    expected = oracle(q, weights[0], 1e-5), oracle(k, weights[1], 1e-5), v.clone()
    assert fused_inplace_qknorm_across_heads(q, k, *weights, 1e-5) is None
    assert_near(q, expected[0])
    assert_near(k, expected[1])
    assert torch.equal(v, expected[2])
