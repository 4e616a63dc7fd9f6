"""The kernels at DeepSeek-V3.2's sizes, against the definitions, and in CUDA graphs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.ops import (
    index_q_quantize,
    mla_kv_store,
    paged_mla,
    paged_mqa_logits,
    ragged_mqa_logits,
    select_topk,
    sparse_mla,
)
from cairn.ops.sparse_mla import index_cache, records
from cairn.ops.sparse_mla.paged_mqa_logits import paged_mqa_logits_into
from cairn.ops.sparse_mla.ragged_mqa_logits import ragged_mqa_logits_into
from cairn.ops.sparse_mla.tuning import TUNING
from cairn.ops.top_k.selection import Rows
from cairn.ops.top_k.selection import select as sorted_selection

pytestmark = pytest.mark.gpu

SIZE, DIM, LATENT, ROPE, TOPK, SCALE = 64, 128, 512, 64, 2048, 0.135
BF16 = torch.bfloat16


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(dtype)


def table_of(rows: int, columns: int) -> Tensor:
    g = torch.Generator("cuda").manual_seed(9)
    order = torch.randperm(rows * columns, generator=g, device="cuda")
    return order.view(rows, columns).int()


def apart(got: Tensor, wanted: Tensor) -> float:
    """1 - 2 sum xy / sum (x^2 + y^2)."""
    x, y = got.double().flatten(), wanted.double().flatten()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


@pytest.mark.parametrize("preshuffled", [False, True])
@pytest.mark.parametrize("heads", [64, 32, 16])
def test_scores(heads: int, preshuffled: bool) -> None:
    """Single tokens and chunks, paged and contiguous keys; repeated calls are bitwise equal."""
    rows, columns = 4, 40
    table = table_of(rows, columns)
    keys = drawn(rows * columns, SIZE, DIM, seed=1)
    cache = index_cache.pack(keys, preshuffled, scale_ue8m0=True)
    row = torch.arange(4, device="cuda").repeat_interleave(33)
    context = torch.randint(0, columns * SIZE + 1, (len(row),), device="cuda", dtype=torch.int32)
    context[7], context[8] = 0, -1
    q, weights = drawn(len(row), heads, DIM, seed=2, dtype=BF16), drawn(len(row), heads, seed=3)
    codes, scaled = index_q_quantize(q, weights)
    given = (codes, scaled, cache, table, row, context)
    wanted = torch.zeros(len(row), columns * SIZE, device="cuda")
    paged_mqa_logits_into.reference(*given, wanted, preshuffled)
    exact = torch.zeros_like(wanted)
    paged_mqa_logits_into.reference(q.float(), weights, keys, table, row, context, exact)
    for chunked in (False, True):
        found = torch.zeros_like(wanted)
        paged_mqa_logits_into(*given, found, preshuffled, 0, chunked)
        assert apart(found, wanted) < 5e-6 and apart(found, exact) < 2e-3
        for _ in range(5):
            again = torch.zeros_like(wanted)
            paged_mqa_logits_into(*given, again, preshuffled, 0, chunked)
            assert torch.equal(again, found)
    line = keys[table[0].long()].flatten(0, 1)
    numbers, scale = index_cache.quantize(line, scale_ue8m0=True)
    start = torch.zeros_like(context)
    side = torch.zeros_like(wanted)
    first = row == 0
    ragged_mqa_logits_into(codes, scaled, numbers, scale, start, context, side)
    assert apart(side[first], wanted[first]) < 5e-6


@pytest.mark.parametrize("heads", [128, 64, 16])
def test_groups_of_warps(heads: int) -> None:
    """Also for fewer tokens and heads than the kernel is used for: split, and with partially filled
    tiles."""
    with TUNING.replaced(group_heads=16, group_programs=1):
        test_attention(False, heads)


@pytest.mark.parametrize("heads", [128, 64, 16, 8, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_attention(quantized: bool, heads: int) -> None:
    """Selected cells and whole rows, few tokens (split) and many, with invalid cells."""
    rows, columns = 4, 40
    pages = rows * columns
    cache = drawn(pages, SIZE, LATENT + ROPE, seed=4, dtype=BF16)
    plain = cache
    if quantized:
        parts = cache.flatten(0, 1).split((LATENT, ROPE), dim=-1)
        cache = records.quantize(*parts).view(pages, SIZE, -1)
        plain = records.dequantize(cache, LATENT).to(BF16)
    for tokens in (1, 6, 150):
        q = drawn(tokens, heads, LATENT + ROPE, seed=5, dtype=BF16)
        g = torch.Generator("cuda").manual_seed(tokens)
        cells = torch.randint(0, pages * SIZE, (tokens, TOPK), generator=g, device="cuda").int()
        length = torch.randint(0, TOPK + 1, (tokens,), generator=g, device="cuda").int()
        length[:1], length[-1:] = TOPK, TOPK
        if tokens > 5:
            length[1:6] = torch.tensor([0, 1, TOPK - 1, 63, 65])
            cells[2, 1::3], cells[3, ::2] = -(1 << 31), pages * SIZE
            cells[4] = -1
        o, lse = sparse_mla(q, cache, cells, length, SCALE, LATENT, dtype=BF16)
        wanted, total = sparse_mla.reference(q, plain, cells, length, SCALE, LATENT)
        torch.testing.assert_close(o.float(), wanted, rtol=2.01 / 128, atol=4e-3)
        torch.testing.assert_close(lse, total, rtol=1e-4, atol=2e-3)
        assert apart(o, wanted) < 5e-6
        table = table_of(rows, columns)
        row = torch.arange(tokens, device="cuda") % rows
        end = torch.randint(0, columns * SIZE, (tokens,), generator=g, device="cuda").int()
        o, lse = paged_mla(q, cache, table, row, end, SCALE, LATENT, dtype=BF16)
        wanted, total = paged_mla.reference(q, plain, table, row, end, SCALE, LATENT)
        torch.testing.assert_close(o.float(), wanted, rtol=2.01 / 128, atol=4e-3)
        torch.testing.assert_close(lse, total, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("heads", [64, 16])
def test_attention_over_records_of_values(heads: int) -> None:
    """DeepSeek-V4's: 448 numbers in float8 with 7 scales, 64 in bfloat16, all of them values."""
    pages, width = 40, 512
    plain = drawn(pages * SIZE, width, seed=8, dtype=BF16)
    parts = plain[:, :448], plain[:, 448:]
    cache = torch.zeros(pages, SIZE, 584, dtype=torch.uint8, device="cuda")
    mla_kv_store(*parts, cache, torch.arange(pages * SIZE, device="cuda"))
    assert torch.equal(cache.flatten(0, 1), records.quantize(*parts))
    for tokens in (1, 70):
        q, sink = drawn(tokens, heads, width, seed=9, dtype=BF16), drawn(heads, seed=10)
        cells = torch.randint(-9, pages * SIZE + 9, (tokens, 640), device="cuda").int()
        length = torch.randint(0, 641, (tokens,), device="cuda").int()
        given = (q, cache, cells, length, 0.044, width, sink)
        o, lse = sparse_mla(*given, dtype=BF16)
        wanted, total = sparse_mla.reference(*given)
        torch.testing.assert_close(o.float(), wanted, rtol=2.01 / 128, atol=4e-3)
        torch.testing.assert_close(lse, total, rtol=1e-4, atol=2e-3)
        assert apart(o, wanted) < 5e-6


@pytest.mark.parametrize("quantized", [False, True])
def test_entries_beyond_the_length_change_no_bit(quantized: bool) -> None:
    """Bitwise equal whether the list ends at the length or continues with cells of NaN."""
    cache = drawn(40, SIZE, LATENT + ROPE, seed=6, dtype=BF16)
    cache[30:] = math.nan
    if quantized:
        parts = cache.flatten(0, 1).split((LATENT, ROPE), dim=-1)
        cache = records.quantize(*parts).view(40, SIZE, -1)
    tokens, wide = 200, 1024
    q = drawn(tokens, 16, LATENT + ROPE, seed=7, dtype=BF16)
    cells = torch.randint(0, 30 * SIZE, (tokens, wide), device="cuda").int()
    length = torch.randint(0, 257, (tokens,), device="cuda").int()
    short = sparse_mla(q, cache, cells[:, :256].contiguous(), length, SCALE, LATENT)
    column = torch.arange(wide, device="cuda")
    cells[column >= length[:, None]] = 35 * SIZE
    long = sparse_mla(q, cache, cells, length, SCALE, LATENT)
    assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[1])


def test_a_graph_reads_lengths_when_it_is_replayed() -> None:
    """Scores, selection and attention of four tokens, captured when all are short."""
    rows, columns = 4, 80
    table = table_of(rows, columns)
    keys = index_cache.pack(drawn(rows * columns, SIZE, DIM, seed=1), False, scale_ue8m0=True)
    cache = drawn(rows * columns, SIZE, LATENT + ROPE, seed=2, dtype=BF16)
    row = torch.arange(rows, device="cuda")
    q, weights = drawn(rows, 16, DIM, seed=3, dtype=BF16), drawn(rows, 16, seed=4)
    codes, scaled = index_q_quantize(q, weights)
    query = drawn(rows, 16, LATENT + ROPE, seed=5, dtype=BF16)
    context = torch.full((rows,), 64, device="cuda", dtype=torch.int32)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        given = (codes, scaled, keys, table, row, context)
        logits = paged_mqa_logits(*given, least=TOPK)
        cells = select_topk(logits, context, TOPK, None, table, row, SIZE)
        o, lse = sparse_mla(query, cache, cells, context, SCALE, LATENT)
        return cells, o, lse

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cells, o, lse = work()
    for lengths in ([64, 1, 2048, 0], [2048, 2049, 5, 5120], [4000, 5000, 3000, 2500]):
        context.copy_(torch.tensor(lengths))
        graph.replay()
        wanted = paged_mqa_logits(codes, scaled, keys, table, row, context)
        for t, count in enumerate(lengths):
            best = sorted_selection(Rows(wanted[t : t + 1], context[t : t + 1], None, TOPK))[0]
            kept = best[best >= 0].long()
            place = table[t, kept // SIZE].long() * SIZE + kept % SIZE
            assert torch.equal(cells[t, : len(kept)].long(), place)
            assert bool((cells[t, len(kept) :] == -1).all()) and len(kept) == min(count, TOPK)
        o_wanted, total = sparse_mla.reference(query, cache, cells, context, SCALE, LATENT)
        torch.testing.assert_close(o, o_wanted, rtol=2e-2, atol=4e-3)
        torch.testing.assert_close(lse, total, rtol=1e-4, atol=2e-3)


def test_far_cells_and_wide_lines() -> None:
    """Records and scores at offsets beyond 2^31 bytes."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free device memory")
    pages = (1 << 31) // (SIZE * (LATENT + ROPE) * 2) + 50
    cache = torch.zeros(pages, SIZE, LATENT + ROPE, dtype=BF16, device="cuda")
    cache[-40:] = drawn(40, SIZE, LATENT + ROPE, dtype=BF16)
    q = drawn(2, 16, LATENT + ROPE, seed=1, dtype=BF16)
    first = (pages - 40) * SIZE
    cells = torch.arange(TOPK, device="cuda").int().repeat(2, 1)
    length = torch.tensor([TOPK, 100], device="cuda")
    near, _ = sparse_mla(q, cache[-40:], cells, length, SCALE, LATENT)
    far, _ = sparse_mla(q, cache, cells + first, length, SCALE, LATENT)
    assert torch.equal(near, far)
    del cache
    tokens, length = 600, 1 << 20
    k = drawn(length, DIM, dtype=BF16).to(torch.float8_e4m3fn)
    codes, weights = drawn(tokens, 16, DIM).to(torch.float8_e4m3fn), drawn(tokens, 16)
    start = torch.full((tokens,), length - 300, device="cuda", dtype=torch.int32)
    logits = ragged_mqa_logits(codes, weights, k, None, start, start + 300)
    alone = ragged_mqa_logits(codes, weights, k[-300:], None, start * 0, start * 0 + 300)
    assert torch.equal(logits[:, -300:], alone)


def test_float8_selections_are_near_exact_ones() -> None:
    """Recall of float8 selections from 16 thousand normal keys, with and without rotation."""
    count, tokens, heads = 16384, 32, 64
    k, q = drawn(count, DIM, seed=1), drawn(tokens, heads, DIM, seed=2)
    weights = drawn(tokens, heads, seed=3)
    start = torch.zeros(tokens, device="cuda", dtype=torch.int32)
    end = start + count
    exact = ragged_mqa_logits(q, weights, k, None, start, end)
    best = select_topk(exact, end, TOPK)
    for hadamard in (False, True):
        codes, scaled = index_q_quantize(q, weights, hadamard)
        transformed = index_cache.rotate(k) if hadamard else k
        numbers, scale = index_cache.quantize(transformed, scale_ue8m0=True)
        logits = ragged_mqa_logits(codes, scaled, numbers, scale, start, end)
        found = select_topk(logits, end, TOPK)
        shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(best, found, strict=True)]
        assert sum(shared) / (tokens * TOPK) >= 0.95


@pytest.mark.parametrize("context", [4096, 65536])
@pytest.mark.parametrize("form", ["bfloat16", "linear", "preshuffled"])
def test_a_needle_far_behind_is_found(form: str, context: int) -> None:
    """A single matching key among thousands is selected at any position and dominates the
    attention; the whole selection equals the definition's."""
    heads, columns = 32, context // SIZE
    table = table_of(1, columns)
    keys = drawn(columns, SIZE, DIM, seed=1)
    cache = drawn(columns, SIZE, LATENT + ROPE, seed=2, dtype=BF16) * 0.1
    needles = [5, TOPK + 7, context // 2, context - 70]
    q = drawn(len(needles), heads, DIM, seed=3, dtype=BF16)
    weights = drawn(len(needles), heads, seed=4).abs()
    query = drawn(len(needles), 16, LATENT + ROPE, seed=5, dtype=BF16)
    for t, slot in enumerate(needles):
        page = int(table[0, slot // SIZE])
        keys[page, slot % SIZE] = q[t].float().mean(0) * 8
        cache[page, slot % SIZE] = query[t].float().mean(0).to(BF16) * 8
    small = cache
    if form != "bfloat16":
        small = records.quantize(*cache.flatten(0, 1).split((LATENT, ROPE), -1))
        small = small.view(columns, SIZE, -1)
    shuffled = form == "preshuffled"
    stored = keys.to(BF16)
    if form != "bfloat16":
        stored = index_cache.pack(keys, shuffled, scale_ue8m0=True)
        q, weights = index_q_quantize(q, weights)
    row = torch.zeros(len(needles), device="cuda", dtype=torch.int64)
    seen = torch.full((len(needles),), context, device="cuda", dtype=torch.int32)
    logits = paged_mqa_logits(q, weights, stored, table, row, seen, preshuffled=shuffled)
    cells = select_topk(logits, seen, TOPK, None, table, row, SIZE)
    position = sorted_selection(Rows(logits, seen, None, TOPK)).long()
    assert torch.equal(cells.long(), table[0].long()[position // SIZE] * SIZE + position % SIZE)
    for t, slot in enumerate(needles):
        assert bool((position[t] == slot).any())
    o, _ = sparse_mla(query, small, cells, seen, 1.0, LATENT)
    wanted, _ = sparse_mla.reference(query, small, cells, seen, 1.0, LATENT)
    assert apart(o, wanted) < 5e-6
