"""timestep_embedding against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import timestep_embedding


@pytest.mark.parametrize("dim", [2, 31, 64])
@pytest.mark.parametrize("flip", [False, True])
def test_against_the_formula(dim: int, flip: bool) -> None:
    t, half = torch.tensor([0.0, 1.0, 17.5, 900.0]), dim // 2
    got = timestep_embedding(t, dim, flip, 0.5, 2.0, 1000)
    assert got.shape == (4, dim)
    for row, step in zip(got.tolist(), t.tolist(), strict=True):
        angles = [2 * step * 1000 ** (-i / (half - 0.5)) for i in range(half)]
        sines, cosines = [math.sin(a) for a in angles], [math.cos(a) for a in angles]
        expected = (cosines + sines if flip else sines + cosines) + [0.0] * (dim % 2)
        assert row == pytest.approx(expected, abs=2e-4)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(BadArgument, match="`dim` is 1, not 2 or more"):
        timestep_embedding(torch.zeros(2), 1)
    with pytest.raises(BadArgument, match="`downscale_freq_shift` is 2"):
        timestep_embedding(torch.zeros(2), 4, downscale_freq_shift=2.0)
