"""8-bit scaled matrix products against float64."""

from __future__ import annotations

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import bmm_fp8, fp8_scaled_mm, int8_scaled_mm

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_scaled_mm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 40
    a, b = ((20 * torch.randn(n, 64)).to(E4M3) for _ in range(2))
    rows, columns, bias = torch.rand(n) / 99, torch.rand(n, 1) / 99, torch.randn(n).to(dtype)
    exact = a.double() @ b.double().T * rows.double()[:, None] * columns.double().T
    got = fp8_scaled_mm(a, b.t(), rows, columns, dtype, bias)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact + bias.double(), rtol=unit, atol=1e-5)


def test_int8_sums_are_exact() -> None:
    a = torch.full((2, 4096), 127, dtype=torch.int8)
    b = torch.full((8, 4096), -127, dtype=torch.int8)
    b[0, 0] = -126
    got = int8_scaled_mm(a, b.t(), torch.ones(2), torch.ones(1), torch.float32)
    wanted = float(-127 * 127 * 4096)
    assert got[0, 1].item() == wanted
    assert got[0, 0].item() == float(torch.tensor(wanted + 127, dtype=torch.float32))


def test_bmm_fp8_of_both_formats() -> None:
    a, b = torch.randn(3, 5, 32).to(E4M3), torch.randn(3, 7, 32).to(torch.float8_e5m2)
    scale = torch.tensor(0.5), torch.tensor([4.0])
    got = bmm_fp8(a, b.transpose(1, 2), *scale, torch.float32)
    wanted = 2 * a.double() @ b.double().transpose(1, 2)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(BadArgument, match="`B` is float8_e5m2, and so is A"):
        bmm_fp8(b, b.transpose(1, 2), *scale, torch.float32)


def test_scales_of_another_number_are_refused() -> None:
    a, b = torch.zeros(4, 32).to(E4M3), torch.zeros(8, 32).to(E4M3)
    with pytest.raises(BadArgument, match=r"`scales_b` has shape \[4\], neither 8 scales nor one"):
        fp8_scaled_mm(a, b.t(), torch.ones(4), torch.ones(4), torch.float32)
