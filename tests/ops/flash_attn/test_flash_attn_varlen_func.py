"""flash_attn_varlen_func against float64 loops."""

from __future__ import annotations

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import flash_attn_varlen_func
from tests.ops.flash_attn.oracle import Rules, attention

QUERIES, KEYS = (5, 0, 9, 1), (5, 4, 3, 30)


def ends(counts) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def drawn(seed: int = 0, dims=(16, 24)):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(QUERIES), 4, dims[0], generator=g)
    k, v = (torch.randn(sum(KEYS), 2, dim, generator=g) for dim in dims)
    return q, k, v


@pytest.mark.parametrize("limit", [9, None])
@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (False, (2, 1))])
def test_every_sequence_alone(causal: bool, window, limit: int | None, device: str) -> None:
    q, k, v = drawn()
    out, lse = flash_attn_varlen_func(
        *(x.to(device) for x in (q, k, v, ends(QUERIES), ends(KEYS))),
        *(limit, None if limit is None else 30),
        causal=causal,
        window_size=window,
        return_softmax_lse=True,
    )
    assert out.shape == (15, 4, 24) and lse.shape == (4, 15)
    parts = (q.split(QUERIES), k.split(KEYS), v.split(KEYS))
    wanted = [attention(Rules(0.25, causal, window), *x) for x in zip(*parts, strict=True)]
    for got, index, dim in ((out, 0, 0), (lse, 1, 1)):
        expected = torch.cat([w[index] for w in wanted], dim)
        torch.testing.assert_close(got.double().cpu(), expected, rtol=2e-5, atol=2e-5)


def test_used_lengths_shorten_in_place(device: str) -> None:
    q, k, v = drawn(1)
    used_q, used_k = (3, 0, 9, 0), (4, 0, 2, 29)
    numbers = (ends(QUERIES), ends(KEYS))
    used = {"seqused_q": torch.tensor(used_q).int(), "seqused_k": torch.tensor(used_k).int()}
    out = flash_attn_varlen_func(
        *(x.to(device) for x in (q, k, v, *numbers)),
        **{name: x.to(device) for name, x in used.items()},
        causal=True,
    )
    for b, part in enumerate(out.double().cpu().split(QUERIES)):
        lines = (q.split(QUERIES)[b][: used_q[b]], *(x.split(KEYS)[b][: used_k[b]] for x in (k, v)))
        wanted = attention(Rules(0.25, True), *lines)[0]
        torch.testing.assert_close(part[: used_q[b]], wanted, rtol=2e-5, atol=2e-5)
        assert bool((part[used_q[b] :] == 0).all())


def test_paged_keys(device: str) -> None:
    q, k, v = drawn(2)
    table = torch.randperm(4 * 8, generator=torch.Generator().manual_seed(0)).view(4, 8)
    caches = []
    for x in (k, v):
        cache = torch.full((32, 4, *x.shape[1:]), torch.nan)
        for b, part in enumerate(x.split(KEYS)):
            for slot, line in enumerate(part):
                cache[table[b, slot // 4], slot % 4] = line
        caches.append(cache)
    got = flash_attn_varlen_func(
        *(x.to(device) for x in (q, *caches, ends(QUERIES))),
        None,
        seqused_k=torch.tensor(KEYS).int().to(device),
        page_table=table.int().to(device),
        causal=True,
    )
    wanted = flash_attn_varlen_func(q, k, v, ends(QUERIES), ends(KEYS), causal=True)
    torch.testing.assert_close(got.cpu(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_queries_of_one_length_need_no_ends(paged: bool, device: str) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, many, 2, 16, generator=g) for many in (4, 12, 12))
    used = torch.tensor([12, 5, 0], dtype=torch.int32)
    options = {"seqused_k": used.to(device), "causal": True, "return_softmax_lse": True}
    given = (q, k, v)
    if paged:
        given = (q, *(x.view(6, 6, 2, 16) for x in (k, v)))
        options["page_table"] = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
    given = [x.to(device) for x in given]
    out, lse = flash_attn_varlen_func(*given, None, None, window_size=(None, None), **options)
    assert out.shape == (3, 4, 2, 16) and lse.shape == (3, 2, 4)
    for b, length in enumerate(used.tolist()):
        wanted = attention(Rules(0.25, True), q[b], k[b, :length], v[b, :length])
        for got, expected in zip((out[b], lse[b]), wanted, strict=True):
            torch.testing.assert_close(got.double().cpu(), expected, rtol=2e-5, atol=2e-5)


def test_no_sequence_at_all(device: str) -> None:
    q, k, v = (x[:0].to(device) for x in drawn())
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = flash_attn_varlen_func(q, k, v, zero, zero, 0, 0, return_softmax_lse=True)
    assert out.shape == (0, 4, 24) and lse.shape == (4, 0)


def test_wrong_arguments_are_named() -> None:
    q, k, v = drawn()
    good = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends(QUERIES), "cu_seqlens_k": ends(KEYS)}
    for change, named in (
        ({"q": q[None]}, "q"),
        ({"k": k[None]}, "k"),
        ({"v": v[1:]}, "v"),
        ({"v": v.half()}, "v"),
        ({"q": q.transpose(0, 2)}, "q"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k"),
        ({"cu_seqlens_q": None}, "q"),
        ({"cu_seqlens_k": ends(KEYS)[:-1]}, "cu_seqlens_k"),
        ({"cu_seqlens_q": ends(QUERIES).long()}, "cu_seqlens_q"),
        ({"seqused_q": torch.zeros(3).int()}, "seqused_q"),
        ({"page_table": torch.zeros(4, 1).int()}, "seqused_k"),
    ):
        with pytest.raises(BadArgument, match=f"flash_attn_varlen_func: argument `{named}`"):
            flash_attn_varlen_func(**{**good, **change})
