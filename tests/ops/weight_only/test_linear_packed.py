"""The engine's 4-bit and 8-bit layouts against codes and float64."""

from __future__ import annotations

import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.weight_only import layout


@pytest.mark.parametrize("bits", [4, 8])
def test_a_shift_takes_out_neighbouring_numbers(bits: int) -> None:
    count = 32 // bits
    codes = torch.randint(0, 1 << bits, (3, 40 * count))
    words = layout.to_words(codes, bits)
    assert words.shape == (48, 3)
    assert torch.equal(layout.from_words(words, bits, 40 * count), codes.int())
    for j in range(count):
        found = words[16:32] >> bits * j & (1 << bits) - 1
        first = 16 * (count + j)
        assert torch.equal(found.T, codes[:, first : first + 16].int())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_products(bits: int, zeros: bool, groups: int) -> None:
    torch.manual_seed(0)
    width, outputs = 144, 20
    codes = torch.randint(0, 1 << bits, (outputs, width))
    scale, zero = torch.rand(groups, outputs), torch.randint(0, 1 << bits, (groups, outputs))
    middle = zero.T.repeat_interleave(width // groups, 1) if zeros else 1 << bits - 1
    factor = scale.T.double().repeat_interleave(width // groups, 1)
    weight, x = (codes - middle) * factor, torch.randn(5, width)
    given = (layout.to_words(codes, bits), scale, zero.short() if zeros else None, bits)
    got = ops.dequantize_packed(*given, width)
    assert torch.equal(got, ((codes - middle).float() * factor.float()))
    product = ops.linear_packed(x, *given)
    torch.testing.assert_close(product.double(), x.double() @ weight.T, rtol=1e-5, atol=1e-3)


def test_words_of_another_width_are_refused() -> None:
    words = torch.zeros(16, 8, dtype=torch.int32)
    with pytest.raises(BadArgument, match=r"`words` has shape \[16, 8\], not \[.., 32, any\]"):
        ops.linear_packed(torch.zeros(1, 130), words, torch.ones(1, 8), None, 4)
