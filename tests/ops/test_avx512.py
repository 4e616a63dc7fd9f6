"""AVX-512 helpers: powers of two, and conversion of bfloat16 pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.ops.cpu import amx, as_array, avx512, jit, prange

pytestmark = pytest.mark.skipif(not amx.AVAILABLE, reason=amx.MISSING)


@jit(threads=True)
def _powers(x, out):
    for n in prange(len(x) // 16):
        avx512.store(out, n * 16, avx512.exp2(avx512.load(x, n * 16)))


@jit(threads=True)
def _join(x, out):
    for _ in prange(1):
        avx512.store(out, 0, avx512.halves(avx512.load(x, 0), avx512.load(x, 16)))


def powers(given):
    x = np.asarray(given, np.float32)
    out = np.full(-(-len(x) // 16) * 16, np.nan, np.float32)
    _powers(np.resize(x, out.shape), out)
    return out[: len(x)]


def test_powers_of_two_are_close_everywhere():
    x = np.linspace(-125, 126, 100_001, dtype=np.float32)
    assert np.abs(powers(x) / 2.0 ** x.astype(np.float64) - 1).max() < 3.2e-6


def test_powers_of_whole_numbers_are_exact():
    whole = np.arange(-126, 128)
    assert np.array_equal(powers(whole), np.float32(2.0) ** whole)


def test_no_power_is_left_of_minus_infinity_and_nan_stays():
    assert np.array_equal(
        powers([-np.inf, -1000, -0.0, np.nan, np.inf]), [0, 0, 1, np.nan, np.inf], equal_nan=True
    )


def test_halves_of_two_lines():
    out = np.empty(16, np.float32)
    _join(np.arange(32, dtype=np.float32), out)
    assert out.tolist() == [*range(8), *range(24, 32)]


@jit(threads=True)
def _round(x, out, again):
    for n in prange(len(x) // 16):
        avx512.store_rounded(out, n * 16, avx512.load(x, n * 16))
        avx512.store(again, n * 16, avx512.widened(out, n * 16))


def test_numbers_are_rounded_to_the_nearest_bfloat16():
    x = torch.cat(
        [torch.randn(4096), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -0.0] * 4)]
    )
    out, again = torch.empty(len(x), dtype=torch.bfloat16), torch.empty(len(x))
    _round(x.numpy(), as_array(out), again.numpy())
    assert torch.equal(out, x.bfloat16())
    assert torch.equal(again, x.bfloat16().float())
