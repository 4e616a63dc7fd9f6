"""Sparse attention against a mask over all keys, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import convert_vertical_slash_indexes, sparse_attn_func, sparse_attn_varlen_func
from cairn.ops.sparse_flash_attn.vertical_slash_attention import vertical_slash_attention
from tests.ops.sampling.variants import runnable_on

Tables = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(params=runnable_on(vertical_slash_attention, "cpu"))
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the functions run: an implementation after the other."""
    implementation = vertical_slash_attention._named(request.param)
    monkeypatch.setattr(vertical_slash_attention, "_select", lambda *call: implementation)
    return implementation.name


def attend(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, *, causal: bool = False, **how: Any
) -> tuple[Tensor, Tensor]:
    """One sequence: q [m, H, d], tables [H, R, ..]; loops over all pairs that are listed."""
    (m, heads, dim), n = q.shape, len(k)
    out, lse = torch.zeros_like(q), torch.full((heads, m), math.inf)
    block_count, block_offset, column_count, column_index = (x.tolist() for x in tables)
    for head in range(heads):
        key, value = (x[:, head * k.shape[1] // heads].double() for x in (k, v))
        for query in range(m):
            r = query // 64
            begins = block_offset[head][r][: block_count[head][r]]
            seen = {t for begin in begins for t in range(begin, begin + 64)}
            seen |= set(column_index[head][r][: column_count[head][r]])
            last = query + n - m if causal else n - 1
            own = sorted(t for t in seen if 0 <= t <= min(last, n - 1))
            if own:
                score = key[own] @ q[query, head].double() * how.get("scale", dim**-0.5)
                if how.get("softcap"):
                    score = how["softcap"] * torch.tanh(score / how["softcap"])
                lse[head, query] = score.logsumexp(0)
                out[query, head] = (score.softmax(0) @ value[own]).to(out.dtype)
    return out, lse


def random_tables(g: torch.Generator, batch: int, heads: int, rows: int, keys: int) -> Tables:
    """Ascending lists; what overlaps or is listed twice counts once."""
    shape = (batch, heads, rows)

    def below(most: int, *size: int) -> Tensor:
        return torch.randint(0, most, size, generator=g, dtype=torch.int32)

    def lists(count: int) -> tuple[Tensor, Tensor]:
        return below(count + 1, *shape), below(keys, *shape, count).sort(dim=-1).values

    return (*lists(3), *lists(40))


@pytest.mark.parametrize("causal, softcap", [(True, 0.0), (False, 3.0)])
def test_even_sequences(chosen: str, causal: bool, softcap: float) -> None:
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, 70, 4, 24, generator=g)
    k, v = torch.randn(2, 2, 150, 2, 24, generator=g)
    tables = random_tables(g, 2, 4, 2, 150)
    out, lse = sparse_attn_func(
        *(q, k, v, *tables), causal=causal, softcap=softcap, return_softmax_lse=True
    )
    for row in range(2):
        own = tuple(table[row] for table in tables)
        wanted = attend(q[row], k[row], v[row], own, causal=causal, softcap=softcap)
        torch.testing.assert_close(out[row], wanted[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[row], wanted[1], rtol=1e-4, atol=1e-5)


def test_ragged_sequences(chosen: str) -> None:
    g = torch.Generator().manual_seed(2)
    queries, keys = [3, 0, 65, 1], [100, 7, 65, 3]
    q = torch.randn(sum(queries), 2, 16, generator=g)
    k, v = torch.randn(2, sum(keys), 1, 16, generator=g)
    tables = random_tables(g, 4, 2, 2, 100)
    ends = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
    out, lse = sparse_attn_varlen_func(
        *(q, k, v, *tables),
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=65,
        max_seqlen_k=100,
        softmax_scale=0.3,
        causal=True,
        return_softmax_lse=True,
    )
    for row in range(4):
        own, at = slice(*ends[0][row : row + 2]), slice(*ends[1][row : row + 2])
        listed = tuple(table[row] for table in tables)
        wanted = attend(q[own], k[at], v[at], listed, causal=True, scale=0.3)
        torch.testing.assert_close(out[own], wanted[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, own], wanted[1], rtol=1e-4, atol=1e-5)


def test_a_query_that_is_no_number_gives_none(chosen: str) -> None:
    g = torch.Generator().manual_seed(4)
    q = torch.randn(1, 5, 2, 16, generator=g)
    k, v = torch.randn(2, 1, 80, 2, 16, generator=g)
    q[0, 3, 1, 7] = torch.nan
    tables = (
        torch.ones(1, 2, 1).int(),
        torch.zeros(1, 2, 1, 1).int(),
        torch.ones(1, 2, 1).int(),
        torch.full((1, 2, 1, 1), 70).int(),
    )
    out, lse = sparse_attn_func(q, k, v, *tables, return_softmax_lse=True)
    assert out[0, 3, 1].isnan().all() and lse[0, 1, 3].isnan()
    assert int(out.isnan().sum()) == 16 and int(lse.isnan().sum()) == 1


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 200), (65, 200)])
def test_tables_that_list_all_keys_give_full_attention(
    queries: int, keys: int, blocks: int, device: str
) -> None:
    if blocks * 64 > keys:
        return
    rows, columns = -(-queries // 64), keys - 64 * blocks
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, 2, 32, generator=g).to(device) for n in (queries, keys, keys))
    shape, options = (2, 2, rows), {"dtype": torch.int32, "device": device}
    tables = (
        torch.full(shape, blocks, **options),
        (torch.arange(blocks, **options) * 64).expand(*shape, -1).contiguous(),
        torch.full(shape, columns, **options),
        (torch.arange(columns, **options) + 64 * blocks).expand(*shape, -1).contiguous(),
    )
    out, lse = sparse_attn_func(q, k, v, *tables, return_softmax_lse=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_the_conversion_lists_what_is_read(device: str) -> None:
    """Diagonals and verticals of one head, by their positions."""
    g = torch.Generator().manual_seed(4)
    m, n = 130, 190
    q, k, v = (torch.randn(1, x, 1, 16, generator=g) for x in (m, n, n))
    lengths = [torch.tensor([x], dtype=torch.int32) for x in (m, n)]
    verticals = torch.tensor([[[0, 1, 77, 150]]], dtype=torch.int32)
    slashes = torch.tensor([[[100, 5, 0]]], dtype=torch.int32)
    tables = convert_vertical_slash_indexes(*lengths, verticals, slashes, m, 64, 64)
    where = [x.to(device) for x in (q, k, v, *tables)]
    out = sparse_attn_func(*where, causal=True)
    wanted, _ = attend(q[0], k[0], v[0], tuple(x[0] for x in tables), causal=True)
    torch.testing.assert_close(out.cpu()[0], wanted, rtol=1e-4, atol=1e-5)
    listed = {int(t) for t in tables[3][0, 0, 0, : tables[2][0, 0, 0]]}
    for begin in tables[1][0, 0, 0, : tables[0][0, 0, 0]].tolist():
        listed |= set(range(begin, begin + 64))
    assert {0, 1} <= listed
    assert {60, 123, 55, 118} <= listed, "own keys and those 5 behind, of the first row block"


def test_nothing_seen_and_poison_outside(chosen: str) -> None:
    g = torch.Generator().manual_seed(5)
    q = torch.randn(1, 5, 1, 16, generator=g)
    k, v = torch.randn(2, 1, 100, 1, 16, generator=g)
    k[:, 64:] = v[:, 64:] = torch.nan
    k[:, 7] = v[:, 7] = torch.inf
    count = torch.tensor([[[0]]], dtype=torch.int32)
    blocks, columns = torch.zeros(1, 1, 1, 2).int(), torch.tensor([[[[3, 5, 7]]]]).int()
    given = (q, k, v, count, blocks, count, columns)
    out, lse = sparse_attn_func(*given, return_softmax_lse=True)
    assert torch.equal(out, torch.zeros_like(q)) and bool((lse == math.inf).all())
    out = sparse_attn_func(*given[:5], count + 2, columns)
    assert bool(out.isfinite().all()) and bool((out != 0).all())
    # Counts beyond the list's length are clamped; keys beyond the sequence are ignored.
    ends = (q, k[:, :6], v[:, :6], count, blocks, count + 9, columns)
    torch.testing.assert_close(sparse_attn_func(*ends), out, rtol=1e-4, atol=1e-5)


def test_results_go_to_out_and_rows_may_be_strided(device: str) -> None:
    g = torch.Generator().manual_seed(6)
    wide = torch.randn(2, 9, 6, 16, generator=g).to(device)
    q, k, v = wide[:, :, :2], wide[:, :, 2:4], wide[:, :, 4:]
    tables = tuple(x.to(device) for x in random_tables(g, 2, 2, 1, 9))
    wanted = sparse_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), *tables)
    room = torch.full((2, 9, 4, 16), 7.0, device=device)
    out = room[:, :, 1:3]
    assert sparse_attn_func(q, k, v, *tables, out=out) is out
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert bool((room[:, :, ::3] == 7).all())


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_probabilities_that_are_asked_for_change_nothing(with_lse: bool, ragged: bool) -> None:
    g = torch.Generator().manual_seed(8)
    given = [torch.randn(1, 9, 2, 16, generator=g) for _ in range(3)]
    tables, front = random_tables(g, 1, 2, 1, 9), sparse_attn_func
    if ragged:
        ends = torch.tensor([0, 9], dtype=torch.int32)
        given = [x[0] for x in given]
        tables, front = (*tables, ends, ends, 9, 9), sparse_attn_varlen_func
    wanted = front(*given, *tables, return_softmax_lse=with_lse)
    got = front(*given, *tables, return_attn_probs=True, return_softmax_lse=with_lse)
    if not with_lse:
        wanted, got = (wanted,), (got,)
    assert len(got) == len(wanted) == 1 + with_lse
    for one, expected in zip(got, wanted, strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
        ({"k": torch.randn(1, 9, 2, 8)}, "`k`"),
        ({"v": torch.randn(1, 8, 2, 16)}, "`v`"),
        ({"k": torch.randn(1, 9, 3, 16), "v": torch.randn(1, 9, 3, 16)}, "`q`"),
        ({"block_count": torch.zeros(1, 2, 0, dtype=torch.int32)}, "block_count"),
        ({"column_index": torch.zeros(1, 2, 1, 4, dtype=torch.int64)}, "column_index"),
        ({"out": torch.zeros(1, 9, 2, 8)}, "out"),
        ({"q": torch.randn(1, 9, 2, 16, dtype=torch.float64)}, "`q`"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], word: str) -> None:
    tables = random_tables(torch.Generator().manual_seed(7), 1, 2, 1, 9)
    names = ("block_count", "block_offset", "column_count", "column_index")
    given = {name: torch.randn(1, 9, 2, 16) for name in "qkv"} | dict(
        zip(names, tables, strict=True)
    )
    sparse_attn_func(**given)
    with pytest.raises(BadArgument, match=f"sparse_attn_func.*{word}"):
        sparse_attn_func(**(given | change))
