"""fused_qk_norm_rope against Python floats, one head at a time."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from cairn.ops import fused_qk_norm_rope


def head(
    numbers: list[float], weight: list[float], position: int, frequencies: list[float], rotary: int,
    is_neox: bool, factor: float,
) -> list[float]:  # fmt: skip
    scale = 1 / math.sqrt(math.fsum(v * v for v in numbers) / len(numbers) + 1e-5)
    normed = [v * scale * w for v, w in zip(numbers, weight, strict=True)]
    half = rotary // 2
    for i, frequency in enumerate(frequencies):
        a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
        rotated = complex(normed[a], normed[b]) * cmath.rect(factor, position * frequency)
        normed[a], normed[b] = rotated.real, rotated.imag
    return normed


def frequencies_of(base: float, rotary: int, factor: float, low: float, high: float) -> list[float]:
    found = []
    for i in range(rotary // 2):
        frequency = base ** (-2 * i / rotary)
        if factor != 1:
            end = high if high != low else high + 0.001
            ramp = min(max((i - low) / (end - low), 0.0), 1.0)
            frequency = frequency / factor * ramp + frequency * (1 - ramp)
        found.append(frequency)
    return found


PLAIN, YARN, STEEP = (1.0, 1.0, 32.0, 1.0), (2.5, 1.0, 5.0, 0.9), (4.0, 2.0, 2.0, 1.1)


@pytest.mark.parametrize("scaling", [PLAIN, YARN, STEEP])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_scalars(
    scaling: tuple[float, ...], is_neox: bool, rotary: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    dim, counts = 12, (3, 1, 2)
    qkv = torch.randn(4, sum(counts) * dim).to(dtype)
    weights = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    positions = torch.tensor([0, 1, 63, 500], dtype=torch.int32)
    expected = qkv.clone().view(4, -1, dim).double()
    frequencies = frequencies_of(10000.0, rotary or dim, *scaling[:3])
    for token in range(4):
        for i in range(counts[0] + counts[1]):
            weight = weights[int(i >= counts[0])].tolist()
            expected[token, i] = torch.tensor(
                head(
                    *(expected[token, i].tolist(), weight, int(positions[token]), frequencies),
                    *(rotary or dim, is_neox, scaling[3]),
                )
            )
    fused_qk_norm_rope(
        *(qkv, *counts, dim, 1e-5, *weights, 10000.0, is_neox, positions, *scaling, rotary)
    )
    half_unit = torch.finfo(dtype).eps / 2
    got = qkv.view(4, -1, dim).double()
    torch.testing.assert_close(got, expected, rtol=half_unit * 1.01 + 1e-5, atol=2e-4)


def test_far_positions_turn_by_the_exact_frequency() -> None:
    # A float32 power is off by some ulp, which at position 2^20 is a measurable angle.
    dim, position = 128, 1 << 20
    qkv = torch.ones(1, dim)
    one = torch.ones(dim)
    spot = torch.tensor([position])
    fused_qk_norm_rope(qkv, 1, 0, 0, dim, 0.0, one, one, 1e6, True, spot, *PLAIN)
    for i in range(dim // 2):
        frequency = torch.tensor(1e6 ** (-2 * i / dim), dtype=torch.float64).float()
        angle = float(torch.tensor(float(position)) * frequency)
        assert abs(qkv[0, i].item() - (math.cos(angle) - math.sin(angle))) < 1e-5
