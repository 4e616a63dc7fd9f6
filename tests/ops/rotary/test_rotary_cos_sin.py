"""rotary_cos_sin against math.cos and math.sin of the float32 angle."""

from __future__ import annotations

import math

import torch

from cairn.ops import rotary_cos_sin


def test_against_scalars() -> None:
    positions = torch.tensor([0, 1, 63, 4095, 131071, 524287])
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    got = rotary_cos_sin(positions, inv_freq)
    assert got.shape == (6, 16)
    assert got.dtype == torch.float32
    for row, position in enumerate(positions.tolist()):
        for column, frequency in enumerate(inv_freq):
            # The angle is a float32 product: models are trained with exactly that rounding.
            angle = float(torch.tensor(float(position)) * frequency)
            assert abs(got[row, column].item() - math.cos(angle)) < 1e-6
            assert abs(got[row, column + 8].item() - math.sin(angle)) < 1e-6


def test_does_not_depend_on_the_batch() -> None:
    positions = torch.randint(0, 1 << 19, (50,))
    inv_freq = torch.rand(32)
    whole = rotary_cos_sin(positions, inv_freq)
    for row in range(50):
        assert torch.equal(rotary_cos_sin(positions[row : row + 1], inv_freq)[0], whole[row])
