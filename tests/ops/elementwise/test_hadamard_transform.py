"""hadamard_transform against Sylvester's matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu, hadamard_transform
from cairn.ops.elementwise.hadamard_transform import hadamard_transform as op


def matrix(size: int) -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while found.shape[0] < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 7, 63, 100, 128, 1000, 2048])
def test_against_the_matrix(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = torch.randn(3, width).to(dtype)
    size = gpu.next_power_of_2(width)
    expected = (x.double() @ matrix(size)[:width, :width] * size**-0.5).to(dtype)
    got = hadamard_transform(x, size**-0.5)
    assert got.dtype == dtype
    half_unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=half_unit + 1e-5, atol=1e-5)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("width", [1, 7, 100, 130, 1000])
def test_kernel_against_the_matrix(width: int) -> None:
    x = torch.randn(2, width)
    size = gpu.next_power_of_2(width)
    expected = (x.double() @ matrix(size)[:width, :width] * 0.25).float()
    torch.testing.assert_close(op.using("triton")(x, 0.25), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("width", [16, 200])
def test_kernel_on_infinity(width: int) -> None:
    x = torch.randn(2, width)
    x[1, 5] = float("inf")
    expected = hadamard_transform(x)
    assert bool(expected[1].isinf().all())
    torch.testing.assert_close(op.using("triton")(x), expected, rtol=1e-5, atol=2e-5)


def test_applied_twice_it_multiplies_by_the_size() -> None:
    x = torch.randn(5, 256)
    twice = hadamard_transform(hadamard_transform(x, 1 / 16), 1 / 16)
    torch.testing.assert_close(twice, x, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [500, 1024, 2048, 4096, 16384])
def test_long_rows_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, width, device="cuda").to(dtype)
    scale = gpu.next_power_of_2(width) ** -0.5
    expected = op.using("reference")(x.float(), scale).to(dtype)
    # Half-precision kernels round to 16 bits between the two products.
    eps, atol = torch.finfo(dtype).eps, 1e-5 if dtype == torch.float32 else 2.0**-15
    torch.testing.assert_close(op.using("triton")(x, scale), expected, rtol=eps + 1e-5, atol=atol)
