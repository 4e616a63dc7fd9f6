"""Kernels that sum split-K parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops.linear import skinny_gemm_panel
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.testing import Make, compare

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(make: Make, splits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Parts, a residual with NaN around its rows, and its sum with them in float32."""
    parts = make.randn(splits, 5, 100, dtype=torch.float32)
    around = make.full((7, 111), torch.nan, dtype)
    residual = around[1:6, 4:104].copy_(make.randn(5, 100, dtype=dtype))
    return parts, residual, residual.float() + parts.sum(0)


def only_rows_changed(residual: Tensor) -> bool:
    around = residual.as_strided((7, 111), (111, 1), 0)
    return int(around.isfinite().sum()) == residual.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_parts_are_added(make: Make, splits: int, dtype: torch.dtype) -> None:
    parts, residual, total = drawn(make, splits, dtype)
    skinny_gemm_panel.add(parts, residual)
    compare(residual, total.to(dtype), (1e-2, 1e-2) if dtype.itemsize == 2 else (1e-5, 1e-5), "sum")
    assert only_rows_changed(residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_of_the_sum_before_it_is_rounded(make: Make, dtype: torch.dtype) -> None:
    parts, residual, total = drawn(make, 3, dtype)
    norm = make.randn(100, dtype=torch.float32)
    wanted = rmsnorm.reference(total, norm, 1e-6).to(dtype)
    got = skinny_gemm_panel.add_and_norm(parts, residual, norm, 1e-6)
    compare(got, wanted, (1e-2, 1e-2) if dtype.itemsize == 2 else (1e-5, 1e-5), "norm")
    assert only_rows_changed(residual)
    if dtype == torch.float16 or (dtype == torch.bfloat16 and make.device != "cpu"):
        # With a sum rounded before the norm, half of the elements would differ in the last bit. The
        # interpreter truncates bfloat16.
        assert int((got != wanted).sum()) <= 10
