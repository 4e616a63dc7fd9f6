"""rotary_embedding against complex multiplication."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import rotary_cos_sin, rotary_embedding


def oracle(x: Tensor, cos_sin: Tensor, is_neox: bool) -> Tensor:
    """x [T, n, d] float64 rotated pair by pair as complex numbers; cos_sin [T, rd]."""
    half = cos_sin.shape[-1] // 2
    rotated = x.clone()
    for pair in range(half):
        a, b = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
        number = torch.complex(x[..., a], x[..., b])
        factor = torch.complex(cos_sin[:, pair], cos_sin[:, pair + half])[:, None]
        rotated[..., a], rotated[..., b] = (number * factor).real, (number * factor).imag
    return rotated


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary", [8, 4, 2])
@pytest.mark.parametrize("form", ["heads", "flat", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_complex_numbers(is_neox: bool, rotary: int, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = rotary_cos_sin(torch.arange(40), torch.rand(rotary // 2))
    positions = torch.randint(0, 40, (9,))
    fused = torch.randn(9, 4 * 8).to(dtype)
    query, key = fused[:, :24], fused[:, 24:]
    before = fused.clone().view(9, 4, 8).double()
    if form == "heads":
        query, key = query.reshape(9, 3, 8), key.reshape(9, 1, 8)
    elif form == "flat":
        query, key = query.clone(), key.clone()
    rotary_embedding(positions, query, key, 8, cache, is_neox)
    got = torch.cat((query.reshape(9, 3, 8), key.reshape(9, 1, 8)), dim=1)
    expected = oracle(before, cache[positions].double(), is_neox)
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.double(), expected, rtol=half_unit * 1.01, atol=1e-6)
    assert torch.equal(got[..., rotary:].double(), before[..., rotary:])


def test_batched_positions_and_no_key() -> None:
    cache = torch.randn(10, 8)
    positions = torch.randint(0, 10, (2, 3))
    query = torch.randn(2, 3, 4, 8)
    flat = query.clone().view(6, 32)
    rotary_embedding(positions, query, None, 8, cache)
    rotary_embedding(positions.flatten(), flat, None, 8, cache)
    assert torch.equal(query.view(6, 32), flat)


@pytest.mark.parametrize("with_key", [True, False])
def test_rotated_arguments_are_returned(with_key: bool) -> None:
    query, key = torch.randn(3, 2, 8), torch.randn(3, 1, 8) if with_key else None
    got = rotary_embedding(torch.arange(3), query, key, 8, torch.randn(5, 8))
    assert got[0] is query and got[1] is key


def test_bfloat16_angles_are_used_as_they_are() -> None:
    half = torch.bfloat16
    cache, positions = torch.randn(5, 8).to(half), torch.arange(5)
    query = torch.randn(5, 2, 8).to(half)
    expected = oracle(query.double(), cache.double(), True)
    rotary_embedding(positions, query, None, 8, cache)
    torch.testing.assert_close(query.double(), expected, rtol=2.0**-8 * 1.01, atol=1e-5)


def test_products_depend_on_the_distance_alone() -> None:
    cache = rotary_cos_sin(torch.arange(100), torch.rand(16))
    query, key = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    scores = []
    for start in (0, 17, 60):
        q, k = query.clone(), key.clone()
        rotary_embedding(torch.tensor([start + 7]), q, None, 32, cache)
        rotary_embedding(torch.tensor([start]), k, None, 32, cache)
        scores.append((q * k).sum())
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-4, atol=1e-4)
