"""Rotary frequencies, compared with their formulas; angles in float32."""

from __future__ import annotations

import math

import torch

from cairn.layers.rotary import (
    Rotary,
    hope_frequencies,
    in_range_frequencies,
    standard_frequencies,
)
from cairn.specs.rotary import RotarySpec


def test_standard():
    expected = [10000.0 ** (-2 * c / 16) for c in range(8)]
    torch.testing.assert_close(standard_frequencies(16, 10000.0), torch.tensor(expected))


def test_in_range_keeps_fast_pairs_and_always_the_first():
    base = standard_frequencies(64, 1e4)
    kept = in_range_frequencies(64, 1e4, 8192, 2.0)
    fast = base >= 2 * math.pi * 2 / 8192
    assert torch.equal(kept, base * fast) and 0 < int(fast.sum()) < 32
    assert in_range_frequencies(16, 1e4, 1, 1.0).tolist() == [1.0] + [0.0] * 7


def test_closed_form():
    values = hope_frequencies(16, 81.0, 4).tolist()
    expected = [1.0, 1 / 3, 1 / 9, 1 / 27, 0, 0, 0, 0]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected))
    assert hope_frequencies(16, 5.0, 1).tolist() == [1.0] + [0.0] * 7


def test_angles_are_float32_products():
    """At position 500,000 the rounding of the product is visible; both factors are float32, too."""
    frequencies = standard_frequencies(64, 1e4)
    positions = torch.tensor([0, 1, 500_000, (1 << 20) - 1])
    angle = positions.float()[:, None] * frequencies
    expected = torch.cat((angle.cos(), angle.sin()), -1)
    rotary = Rotary(RotarySpec("standard", 64, 1e4))
    torch.testing.assert_close(rotary.cos_sin(positions, torch.bfloat16), expected, rtol=0, atol=0)
    rounded = Rotary(RotarySpec("standard", 64, 1e4, rounded=True))
    half = rounded.cos_sin(positions, torch.bfloat16)
    assert half.dtype == torch.float32 and torch.equal(half, expected.bfloat16().float())
    assert torch.equal(rounded.cos_sin(positions, torch.float32), expected)


def test_rotate():
    """x' = x cos + rotate_half(x) sin; a pair with frequency 0 is unchanged."""
    rotary = Rotary(RotarySpec("hope", 4, 4.0, pairs=1))
    positions = torch.tensor([3, 4])
    cos_sin = rotary.cos_sin(positions, torch.float32)
    x = torch.randn(2, 3, 4)
    query, key = x.clone(), x[:, :1].clone()
    rotary.rotate(torch.arange(2), query, key, cos_sin)
    for i, position in enumerate((3, 4)):
        a, b = x[i, :, 0], x[i, :, 2]
        cos, sin = math.cos(position), math.sin(position)
        torch.testing.assert_close(query[i, :, 0], a * cos - b * sin)
        torch.testing.assert_close(query[i, :, 2], b * cos + a * sin)
    assert torch.equal(query[..., 1::2], x[..., 1::2])
    assert torch.equal(key, query[:, :1])


def test_interleaved_pairs_and_dimensions_that_pass():
    rotary = Rotary(RotarySpec("standard", 4, 100.0, interleaved=True))
    positions = torch.tensor([3])
    x = torch.randn(1, 2, 6)
    query = x.clone()
    rotary.rotate(torch.arange(1), query, None, rotary.cos_sin(positions, torch.float32))
    for pair, frequency in enumerate((1.0, 0.1)):
        a, b = x[0, :, 2 * pair], x[0, :, 2 * pair + 1]
        cos, sin = math.cos(3 * frequency), math.sin(3 * frequency)
        torch.testing.assert_close(query[0, :, 2 * pair], a * cos - b * sin)
        torch.testing.assert_close(query[0, :, 2 * pair + 1], b * cos + a * sin)
    assert torch.equal(query[..., 4:], x[..., 4:])
