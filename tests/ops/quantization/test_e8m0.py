"""e8m0 scales against powers of two."""

from __future__ import annotations

import math

import pytest
import torch

from cairn.ops.quantization import e8m0


def test_every_code_is_worth_its_power() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = e8m0.decode(codes)
    assert values[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert bool(values[255].isnan())
    assert torch.equal(e8m0.decode(codes.view(torch.float8_e8m0fnu))[:255], values[:255])
    assert torch.equal(codes.view(torch.float8_e8m0fnu).float()[:255], values[:255])
    assert torch.equal(e8m0.encode(values)[1:], codes[1:])


@pytest.mark.parametrize(
    "scale, code",
    [
        *((1.0, 127), (1.49, 128), (1.5, 128), (2.0, 128), (3.0, 129), (0.75, 127), (0.5, 126)),
        *((1.0000001, 128), (0.0, 0), (-0.0, 0)),
        *(
            (2.0**-126, 1),
            (2.0**-127, 1),
            (1e-45, 1),
            (2.0**127, 254),
            (3e38, 255),
            (math.inf, 255),
        ),
        *((math.nan, 255), (-1.0, 255), (-math.inf, 255), (-math.nan, 255)),
    ],
)
def test_a_scale_is_rounded_up(scale: float, code: int) -> None:
    assert e8m0.encode(torch.tensor([scale])).tolist() == [code]


def test_power_of_two_is_the_least_that_is_not_below() -> None:
    g = torch.Generator().manual_seed(0)
    scale = torch.rand(2000, generator=g) * 2.0 ** torch.randint(-100, 100, (2000,), generator=g)
    for given, power in zip(scale.tolist(), e8m0.power_of_two(scale).tolist(), strict=True):
        assert power / 2 < given <= power
        assert math.frexp(power)[0] == 0.5
    assert e8m0.power_of_two(scale.view(40, 50).T).shape == (50, 40)
