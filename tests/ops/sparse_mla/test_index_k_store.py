"""Stores of index keys against the layouts' definitions, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import index_k_gather, index_k_store
from cairn.ops.sparse_mla import index_cache

SIZE, DIM = 32, 48
E4M3 = torch.float8_e4m3fn


def number_byte(token: int, dim: int, preshuffled: bool) -> int:
    """Byte offset in a page: tiles of 16 tokens by 16 dims, or row-major."""
    if not preshuffled:
        return token * DIM + dim
    return (token // 16) * 16 * DIM + (dim // 16) * 256 + (token % 16) * 16 + dim % 16


def keys(device: str, tokens: int = 50, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(0)
    k = torch.randn(tokens, DIM, generator=g) * 10 ** torch.linspace(-6, 6, tokens)[:, None]
    k[3:4] = 0
    return k.to(dtype).to(device)


def places(device: str, tokens: int = 50, pages: int = 4) -> Tensor:
    g = torch.Generator().manual_seed(1)
    location = torch.randperm(pages * SIZE, generator=g)[:tokens]
    location[::7] = -1 - torch.arange(len(location[::7]))
    return location.to(device)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("preshuffled", [False, True])
def test_bytes_of_a_quantized_page(preshuffled: bool, power: bool, device: str) -> None:
    k, location = keys(device), places(device)
    cache = torch.full((4, SIZE * (DIM + 4)), 7, dtype=torch.uint8, device=device)
    index_k_store(k, cache, location, preshuffled, power)
    expected = torch.full((4, SIZE * (DIM + 4)), 7, dtype=torch.uint8)
    for token, place in zip(k.cpu(), location.tolist(), strict=True):
        if place < 0:
            continue
        page, slot = divmod(place, SIZE)
        scale = max(token.abs().max(), torch.tensor(1e-4)) / 448
        if power:
            scale = torch.tensor(2.0 ** math.ceil(math.log2(float(scale))))
        numbers = (token / scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
        for dim in range(DIM):
            expected[page, number_byte(slot, dim, preshuffled)] = numbers[dim]
        at = SIZE * DIM + 4 * slot
        expected[page, at : at + 4] = scale.view(1).view(torch.uint8)
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("preshuffled", [False, True])
def test_gather_gives_back_what_was_stored(preshuffled: bool, device: str) -> None:
    k, location = keys(device), places(device)
    cache = torch.zeros(4, SIZE * (DIM + 4), dtype=torch.uint8, device=device)
    index_k_store(k, cache, location, preshuffled)
    numbers, scale = index_k_gather(cache, location, DIM, preshuffled)
    wanted, scales = index_cache.quantize(k, scale_ue8m0=False)
    kept = location >= 0
    assert torch.equal(numbers[kept].view(torch.uint8), wanted[kept].view(torch.uint8))
    assert torch.equal(scale[kept], scales[kept])
    assert not numbers[~kept].float().any() and bool((scale[~kept] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantized_keys_come_back(dtype: torch.dtype, device: str) -> None:
    k, location = keys(device, dtype=dtype), places(device)
    cache = torch.full((4, SIZE, DIM), math.nan, dtype=dtype, device=device)
    index_k_store(k, cache, location)
    kept = location >= 0
    assert torch.equal(cache.flatten(0, 1)[location[kept]], k[kept])
    assert int(cache.isnan().any(-1).sum()) == 4 * SIZE - int(kept.sum())
    got, scale = index_k_gather(cache, location, DIM)
    assert torch.equal(got[kept], k[kept]) and bool((scale == 1).all())
    assert not got[~kept].any()


@pytest.mark.parametrize("quantized", [False, True])
def test_nothing_is_written_where_all_are_skipped(quantized: bool, device: str) -> None:
    shape = (2, SIZE * (DIM + 4)) if quantized else (2, SIZE, DIM)
    dtype = torch.uint8 if quantized else torch.float32
    cache = torch.ones(shape, dtype=dtype, device=device)
    index_k_store(keys(device, 3), cache, torch.tensor([-1, -5, -1], device=device))
    assert bool((cache == 1).all())


def test_layouts_are_permutations_of_each_other(device: str) -> None:
    page = torch.arange(SIZE * (DIM + 4), dtype=torch.int32).to(torch.uint8)[None].to(device)
    linear, scales = index_cache.unpack(page, DIM, preshuffled=False)
    shuffled, others = index_cache.unpack(page, DIM, preshuffled=True)
    assert torch.equal(scales, others)
    offset = torch.arange(SIZE, device=device)
    at = index_cache.byte_positions(offset, SIZE, DIM, preshuffled=True)
    assert at.flatten().sort().values.tolist() == list(range(SIZE * (DIM + 4)))
    assert torch.equal(shuffled[0].view(torch.uint8), page[0, at[:, :DIM]])
    assert not torch.equal(shuffled.view(torch.uint8), linear.view(torch.uint8))


def test_nan_and_infinity_affect_their_own_key_only(device: str) -> None:
    k = keys(device, 4)
    k[1, 5], k[2, 7] = math.nan, math.inf
    cache = torch.zeros(1, SIZE * (DIM + 4), dtype=torch.uint8, device=device)
    index_k_store(k, cache, torch.arange(4, device=device))
    numbers, scale = index_k_gather(cache, torch.arange(4, device=device), DIM)
    finite = (numbers.float() * scale[:, None]).isfinite().all(1)
    assert finite.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    "shape, dtype, preshuffled, said",
    [
        ((4, SIZE * (DIM + 4) + 1), torch.uint8, False, r"`cache` has shape \[4, 1665\]"),
        ((4, 4 * (DIM + 4)), torch.uint8, True, "`preshuffled` is True, but tiles of 16"),
        ((4, SIZE, DIM), torch.float32, True, "`preshuffled` is True, but the cache is not"),
        ((4, SIZE, DIM), torch.bfloat16, False, "`k` is float32, not bfloat16"),
        ((1, SIZE, DIM), torch.float32, False, "`location` holds"),
    ],
)
def test_wrong_arguments_are_named(
    shape: tuple[int, ...], dtype: torch.dtype, preshuffled: bool, said: str
) -> None:
    cache = torch.zeros(shape, dtype=dtype)
    with pytest.raises(BadArgument, match=said):
        index_k_store(keys("cpu"), cache, places("cpu"), preshuffled)
