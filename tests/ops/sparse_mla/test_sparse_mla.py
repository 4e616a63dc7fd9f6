"""Latent attention over cells against softmax in float64, one token and head after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import merge_state_v2, mla_kv_store, sparse_mla
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.sparse_mla import records

SIZE, LATENT, ROPE, PAGES = 8, 128, 16, 12
SCALE, WIDTH = 0.11, 24
FEW = PAGES - 2
"""Number of pages with an owner."""


def cache_of(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Records; the last two pages and the last slots of other pages are NaN."""
    g = torch.Generator().manual_seed(0)
    cache = torch.randn(PAGES, SIZE, LATENT + ROPE, generator=g).to(dtype)
    cache[FEW:] = cache[:, -1] = math.nan
    return cache.to(device)


def queries(device: str, tokens: int, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(tokens, heads, LATENT + ROPE, generator=g).to(dtype).to(device)


def cells_of(device: str, tokens: int, width: int = WIDTH) -> Tensor:
    """Random cells whose records contain no NaN."""
    g = torch.Generator().manual_seed(2)
    page = torch.randint(0, FEW, (tokens, width), generator=g)
    offset = torch.randint(0, SIZE - 1, (tokens, width), generator=g)
    return (page * SIZE + offset).to(torch.int32).to(device)


def attention(
    q: Tensor, keys: Tensor, cells: list[int], sink: float | None = None
) -> tuple[Tensor, Tensor]:
    """o [H, r], lse [H] float64 of one token over lines of keys [cells, r + dr]."""
    heads = q.shape[0]
    if not cells:
        return torch.zeros(heads, LATENT).double(), torch.full((heads,), -math.inf).double()
    k = keys.double().cpu()[cells]
    scores = q.double().cpu() @ k.T * SCALE
    lse = scores.logsumexp(-1)
    o = scores.softmax(-1) @ k[:, :LATENT]
    return (o if sink is None else o / (1 + torch.exp(sink - lse))[:, None]), lse


def counted(cells: Tensor, length: Tensor) -> list[list[int]]:
    """Valid cells."""
    return [
        [c for c in own[: max(0, n)] if 0 <= c < PAGES * SIZE]
        for own, n in zip(cells.tolist(), length.tolist(), strict=True)
    ]


def spoil(cells: Tensor, length: Tensor) -> None:
    """Insert invalid cells, and cells of NaN beyond the length."""
    column = torch.arange(cells.shape[1], device=cells.device)
    cells[column >= length[:, None]] = FEW * SIZE + 1
    wild = [-1, -(1 << 31), (1 << 31) - 1, PAGES * SIZE, -2]
    for place, number in enumerate(wild):
        cells[::2, 3 * place] = number


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_against_float64(heads: int, quantized: bool, device: str) -> None:
    length = torch.tensor([0, 1, WIDTH - 1, WIDTH, WIDTH + 9, 5, -3], device=device)
    q, cells = queries(device, len(length), heads), cells_of(device, len(length))
    spoil(cells, length)
    cells[3] = -1
    keys = cache = cache_of(device)
    if quantized:
        parts = cache.split((LATENT, ROPE), dim=-1)
        cache = records.quantize(*(x.flatten(0, 1) for x in parts)).view(PAGES, SIZE, -1)
        keys = records.dequantize(cache, LATENT)
    o, lse = sparse_mla(q, cache, cells, length, SCALE, LATENT)
    assert o.dtype == lse.dtype == torch.float32 and o.shape == (len(length), heads, LATENT)
    for t, own in enumerate(counted(cells, length)):
        wanted, total = attention(q[t], keys.flatten(0, 1), own)
        torch.testing.assert_close(o[t].double().cpu(), wanted, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse[t].double().cpu(), total, rtol=1e-6, atol=1e-5)
    for empty in (0, 3, 6):
        assert not o[empty].any() and bool((lse[empty] == -math.inf).all())


def test_a_sink_takes_its_share(device: str) -> None:
    length = torch.tensor([WIDTH, 4, 0], device=device)
    q, cells, cache = queries(device, 3, 5), cells_of(device, 3), cache_of(device)
    sinks = [0.7, -2.0, math.inf, -math.inf, 300.0]
    sink = torch.tensor(sinks, device=device)
    o, lse = sparse_mla(q, cache, cells, length, SCALE, LATENT, sink)
    without, same = sparse_mla(q, cache, cells, length, SCALE, LATENT)
    assert torch.equal(lse, same)
    assert torch.equal(o[:, 3], without[:, 3]) and not o[:, 2].any() and not o[2].any()
    for t, own in enumerate(counted(cells, length)[:2]):
        for head, number in enumerate(sinks):
            wanted, _ = attention(q[t, head : head + 1], cache.flatten(0, 1), own, number)
            torch.testing.assert_close(o[t, head].double().cpu(), wanted[0], rtol=2e-5, atol=2e-5)


def test_nan_and_infinity_of_one_query_stay_there(device: str) -> None:
    length = torch.full((3,), WIDTH, device=device)
    q, cells, cache = queries(device, 3, 2), cells_of(device, 3), cache_of(device)
    before = sparse_mla(q, cache, cells, length, SCALE, LATENT)[0]
    q[1] = math.nan
    after, lse = sparse_mla(q, cache, cells, length, SCALE, LATENT)
    assert torch.equal(after[::2], before[::2]) and bool(lse[::2].isfinite().all())
    q[1] = math.inf
    assert torch.equal(sparse_mla(q, cache, cells, length, SCALE, LATENT)[0][::2], before[::2])


def test_strided_queries_and_bfloat16(device: str) -> None:
    length = torch.tensor([WIDTH, 7], device=device)
    cache, cells = cache_of(device, torch.bfloat16), cells_of(device, 2)
    q = queries(device, 2, 6, torch.bfloat16)
    o, lse = sparse_mla(q[:, ::2], cache, cells, length, SCALE, LATENT, dtype=torch.bfloat16)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    same, _ = sparse_mla(q[:, ::2].contiguous(), cache, cells, length, SCALE, LATENT)
    torch.testing.assert_close(o.float(), same, rtol=1e-2, atol=1e-2)
    apart = torch.stack((cache, cache), dim=1)[:, 0]
    assert torch.equal(sparse_mla(q[:, ::2], apart, cells, length, SCALE, LATENT)[0], same)


def test_parts_of_the_cells_merge(device: str) -> None:
    length = torch.full((4,), WIDTH, device=device)
    q, cells, cache = queries(device, 4, 3), cells_of(device, 4), cache_of(device)
    whole, lse = sparse_mla(q, cache, cells, length, SCALE, LATENT)
    for cut in (0, 1, 10, WIDTH):
        parts = [
            sparse_mla(q, cache, own.contiguous(), length, SCALE, LATENT)
            for own in cells.split((cut, WIDTH - cut), dim=1)
        ]
        o, total = merge_state_v2(*parts[0], *parts[1])
        torch.testing.assert_close(o, whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total, lse, rtol=1e-6, atol=1e-6)


def test_blocks_of_queries_do_not_show() -> None:
    length = torch.arange(40) % (WIDTH + 1)
    q, cells, cache = queries("cpu", 40, 16), cells_of("cpu", 40), cache_of("cpu")
    sink = torch.linspace(-3, 3, 16)
    given = (q, cache, cells, length, SCALE, LATENT, sink)
    wanted = sparse_mla(*given)
    for size in (1, 50_000):
        with ATTENTION_TUNING.replaced(paging_block_bytes=size):
            for got, before in zip(sparse_mla(*given), wanted, strict=True):
                assert torch.equal(got, before)


def test_many_queries(device: str) -> None:
    tokens = 70_000
    cache = cache_of(device)[..., LATENT - 4 :].contiguous()
    q = queries(device, 100, 1)[..., LATENT - 4 :].repeat(tokens // 100, 1, 1)
    cells = cells_of(device, 100, 2).repeat(tokens // 100, 1)
    length = torch.full((tokens,), 2, device=device)
    o, _ = sparse_mla(q, cache, cells, length, SCALE, 4)
    torch.testing.assert_close(o.view(-1, 100, 4), o[:100].view(1, 100, 4).expand(700, -1, -1))


def test_records_byte_by_byte(device: str) -> None:
    g = torch.Generator().manual_seed(5)
    latent = torch.randn(6, 512, generator=g) * 10 ** torch.linspace(-7, 4, 6)[:, None]
    latent[2, 128:256] = 0
    k_pe = torch.randn(6, 64, generator=g) * 1000
    cache = torch.full((3, 4, 656), 9, dtype=torch.uint8, device=device)
    location = torch.tensor([11, 0, 5, -1, 7, 3])
    mla_kv_store(latent.to(device), k_pe.to(device), cache, location.to(device))
    expected = torch.full((12, 656), 9, dtype=torch.uint8)
    for token, place in enumerate(location.tolist()):
        if place < 0:
            continue
        for tile in range(4):
            numbers = latent[token, 128 * tile : 128 * tile + 128]
            least = max(float(numbers.abs().max()) / 448, 1e-4)
            scale = torch.tensor([2.0 ** math.ceil(math.log2(least))])
            codes = (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            expected[place, 128 * tile : 128 * tile + 128] = codes.view(torch.uint8)
            expected[place, 512 + 4 * tile : 516 + 4 * tile] = scale.view(torch.uint8)
        expected[place, 528:] = k_pe[token].bfloat16().view(torch.uint8)
    assert torch.equal(cache.view(12, 656).cpu(), expected)
    zero = cache.view(12, 656)[5, 516:520].view(torch.float32)
    assert zero.tolist() == [2.0**-13]
    worth = records.dequantize(cache.view(12, 656)[location.to(device)[:3]], 512).cpu()
    torch.testing.assert_close(worth[1:, :512], latent[1:3], rtol=0.07, atol=1e-3)
    assert torch.equal(worth[:, 512:], k_pe[:3].bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_records_are_stored_as_they_are(dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(6)
    both = torch.randn(5, LATENT + ROPE, generator=g).to(dtype).to(device)
    cache = torch.full((3, SIZE, LATENT + ROPE), math.nan, dtype=dtype, device=device)
    location = torch.tensor([3, -1, 20, 0, -9], device=device)
    mla_kv_store(*both.split((LATENT, ROPE), dim=1), cache, location)
    lines = cache.flatten(0, 1)
    assert torch.equal(lines[[3, 20, 0]], both[[0, 2, 3]])
    assert int(lines.isnan().any(-1).sum()) == 3 * SIZE - 3


@pytest.mark.parametrize("quantized", [False, True])
def test_two_lists_of_two_caches_are_one_softmax(quantized: bool, device: str) -> None:
    """Equal to one list of a cache with the pages of both."""
    q, cache = queries(device, 6, 3), cache_of(device)
    if quantized:
        parts = cache.flatten(0, 1).split((LATENT, ROPE), dim=-1)
        cache = records.quantize(*parts).view(PAGES, SIZE, -1)
    cells, more = cells_of(device, 6), cells_of(device, 6, 2 * WIDTH)[:, WIDTH:] % (4 * SIZE)
    length = torch.tensor([WIDTH, 0, 5, WIDTH + 9, -3, 1], device=device)
    further = torch.tensor([3, 7, 0, WIDTH, 2, -1], device=device)
    spoil(cells, length)
    given = {"extra_cache": cache[3:7].clone(), "extra_cells": more.contiguous()}
    sink = torch.tensor([0.3, math.inf, -math.inf], device=device)
    o, lse = sparse_mla(q, cache, cells, length, SCALE, LATENT, sink, extra_length=further, **given)
    column = torch.arange(WIDTH, device=device)
    first = cells.where(column < length[:, None], -1)
    second = (more + 3 * SIZE).where(column < further[:, None], -1)
    both, every = torch.cat((first, second), dim=1), torch.full_like(length, 2 * WIDTH)
    wanted, total = sparse_mla(q, cache, both, every, SCALE, LATENT, sink)
    torch.testing.assert_close(o, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, total, rtol=1e-5, atol=1e-5)
    with pytest.raises(BadArgument, match="`extra_length` is None, unlike the others"):
        sparse_mla(q, cache, cells, length, SCALE, LATENT, **given)


def test_wrong_arguments_are_named() -> None:
    q, cache = queries("cpu", 2, 3), cache_of("cpu")
    cells, length = cells_of("cpu", 2), torch.ones(2, dtype=torch.int32)
    small = torch.zeros(2, SIZE, 656, dtype=torch.uint8)
    for args, said in (
        ((q, cache, cells, length, SCALE, 0), "`value_dim` is 0, not 1 to the 144 numbers"),
        ((q, cache, cells, length, SCALE, 145), "`value_dim` is 145, not 1 to the 144 numbers"),
        ((q, cache.bfloat16(), cells, length, SCALE, LATENT), "`cache` is bfloat16, not float32"),
        ((q, small, cells, length, SCALE, LATENT), r"`cache` has shape \[2, 8, 656\], not \[any"),
        ((q, small, cells, length, SCALE, 100), "`cache` is uint8: a latent of 100 numbers is no"),
        ((q, cache, cells.long(), length, SCALE, LATENT), "`cells` is int64, not int32"),
        ((q[:, :0], cache, cells, length, SCALE, LATENT), r"`q` has shape \[2, 0, 144\]: no head"),
    ):
        with pytest.raises(BadArgument, match=said):
            sparse_mla(*args)
    latent, k_pe = q[:, 0].split((LATENT, ROPE), dim=-1)
    with pytest.raises(BadArgument, match="`location` holds 96, not numbers up to 95"):
        mla_kv_store(latent, k_pe, cache, torch.tensor([0, PAGES * SIZE]))
