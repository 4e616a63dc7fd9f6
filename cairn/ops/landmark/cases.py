"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.cache import quantized
from cairn.ops.landmark.blend_window import blend_window
from cairn.ops.landmark.framed_attention import framed_attention
from cairn.ops.landmark.landmark_attention import landmark_attention
from cairn.ops.landmark.mean_summary import mean_summary
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.page_weights import page_weights
from cairn.ops.landmark.prior_summary import prior_summary
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.landmark.select_task import STRATEGIES
from cairn.ops.landmark.store_prior_summary import store_prior_summary
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.testing import Cases, Make, Paged


@blend_window.cases
def _(make: Make) -> Cases:
    pages, window, weight = make.randn(3, 4, 16), make.randn(3, 4, 16), make.rand(3, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield make.args(pages, window, weight, dtype)
    yield make.args(pages[:0], window[:0], weight[:0], torch.float32)


def _framed(make: Make, paged: Paged, pages: int) -> tuple[Tensor, ...]:
    """window_k, window_v, k_cache, v_cache, k_frames, v_frames, frame_of and window_table for
    caches of so many pages. Half of the pages have frames; memory that must not be read is NaN."""
    heads, nan = paged.k_cache.shape[1], float("nan")
    order = make.rand(pages).argsort()
    caches = paged.k_cache, paged.v_cache
    window = [torch.empty_like(cache) for cache in caches]
    host = [cache.clone() for cache in caches]
    frames = [torch.full_like(cache, nan) for cache in caches]
    frame_of = make.full((heads, pages), -(1 << 31), torch.int32)
    for cache, moved in zip(caches, window, strict=True):
        moved[order] = cache
    for head in range(heads):
        own, places = (make.rand(pages).argsort()[: pages // 2] for _ in range(2))
        frame_of[head, own] = places.int()
        for cache, held in zip(host, frames, strict=True):
            held[places, head] = cache[own, head]
            cache[own, head] = nan
    return (*window, *host, *frames, frame_of, order[paged.page_table.long()].int())


@framed_attention.cases
def _(make: Make) -> Cases:
    for dtype, size, groups, group in ((torch.float32, 8, 2, 4), (torch.bfloat16, 16, 1, 8)):
        heads = groups * group
        paged = make.paged((275, 9, 90), groups, size, 16, dtype=dtype)
        row, slot, _ = paged.queries((3, 2, 2))
        pages = paged.k_cache.shape[0]
        q = make.randn(row.numel(), heads, 16, dtype=dtype)
        z = make.randint(-3, 4, row.numel(), heads, 16).to(dtype)
        key = make.randint(-2, 3, pages, heads, 16).to(dtype)
        bias = make.randint(0, 5, pages, heads).float() / 4
        *framed, window_table = _framed(make, paged, pages)
        where = (row, slot, window_table, paged.page_table, 2 * size + 1, 3)
        for softmax1, more in ((False, {}), (True, {"store_summaries": True})):
            yield make.args(q, z, *framed, key, bias, *where, softmax1, **more)
        yield make.args(q, z, *framed, key, None, *where, True, strategy="head")
        for form in make.kv_formats:
            packed = [quantized.pack(cache, form) for cache in framed[:-1]]
            yield make.args(q, z, *packed, framed[-1], key, bias, *where, True)
        none = (row[:0], slot[:0], *where[2:])
        yield make.args(q[:0], z[:0], *framed, key, bias, *none, True)
        if make.device != "cpu":
            # Rows of so many pages that their chunks list thousands.
            picked = make.randint(0, 275 // size, 3, 100_000)
            windows, table = (full[0][picked] for full in (window_table, paged.page_table))
            slot = make.randint(50_000 * size, 100_000 * size, row.numel())
            where = (row, slot, windows, table, 2 * size + 1, 32)
            yield make.args(q, z, *framed, key, bias, *where, True)


@landmark_attention.cases
def _(make: Make) -> Cases:
    for dtype, size, groups, group in (
        (torch.float32, 8, 2, 4),
        (torch.bfloat16, 16, 1, 8),
        (torch.float32, 4, 3, 1),
    ):
        heads = groups * group
        lengths, counts = (275, 9, 90), (20, 9, 2)
        paged = make.paged(lengths, groups, size, 16, dtype=dtype)
        row, slot, _ = paged.queries(counts)
        pages = paged.k_cache.shape[0]
        q = make.randn(row.numel(), heads, 16, dtype=dtype)
        # Integers: rounding cannot change the order of their scores.
        z = make.randint(-3, 4, row.numel(), heads, 16).to(dtype)
        key = make.randint(-2, 3, pages, heads, 16).to(dtype)
        bias = make.randint(0, 5, pages, heads).float() / 4
        caches = (paged.k_cache, paged.v_cache)
        where = (row, slot, paged.page_table, 2 * size + 1, 3)
        for softmax1 in (False, True):
            yield make.args(q, z, *caches, key, bias, *where, softmax1)
        yield make.args(q, z, *caches, key, None, *where, True, scale=0.5)
        yield make.args(q, z, *caches, key, bias, *where, True, chunked=True)
        stored = {"store_summaries": True}
        if group > 1:
            yield make.args(q, z, *caches, key, bias, *where, True, **stored)
            wide = (*where[:3], 40, *where[4:])
            yield make.args(q, z, *caches, key, bias, *wide, True, **stored)
        landmark = make.randint(-2, 3, pages, groups, 16).to(dtype)
        for strategy in STRATEGIES:
            yield make.args(q, z, *caches, landmark, None, *where, True, strategy=strategy)
        one = (row[5:6], slot[5:6], *where[2:])
        yield make.args(q[5:6], z[5:6], *caches, key, bias, *one, True)
        none = (row[:0], slot[:0], *where[2:])
        yield make.args(q[:0], z[:0], *caches, key, bias, *none, True)
        for form in make.kv_formats:
            bytes_of = paged.quantized(form)
            yield make.args(q, z, bytes_of.k_cache, bytes_of.v_cache, key, bias, *where, True)
        # Rows so short that every page before the window is selected.
        short = make.paged((6 * size, 9, 3 * size + 1), groups, size, 16, dtype=dtype)
        row, slot, _ = short.queries((size + 2, 9, 1))
        given = (q[: len(row)], z[: len(row)], short.k_cache, short.v_cache)
        few = (key[: len(short.k_cache)], bias[: len(short.k_cache)])
        where = (row, slot, short.page_table[:, :-1], *where[3:])
        for softmax1 in (False, True):
            yield make.args(*given, *few, *where, softmax1)
        yield make.args(*given, few[0], None, *where, True, scale=0.5, strategy="head")
        yield make.args(*given, *few, *where, True, chunked=True, store_summaries=True)
    if make.device != "cpu":
        # Enough tiles to fill a GPU.
        paged = make.paged((3_000, 900), 2, 64, 64, dtype=torch.bfloat16)
        row, slot, _ = paged.queries((800, 200))
        q, z = (make.randint(-2, 3, 1_000, 16, 64).to(torch.bfloat16) for _ in range(2))
        key = make.randint(-1, 2, len(paged.k_cache), 16, 64).to(torch.bfloat16)
        where = (row, slot, paged.page_table, 256, 8)
        yield make.args(q, z, paged.k_cache, paged.v_cache, key, None, *where, True)
        for form in make.kv_formats:
            bytes_of = paged.quantized(form)
            yield make.args(q, z, bytes_of.k_cache, bytes_of.v_cache, key, None, *where, True)


@mean_summary.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        cache = make.randn(6, 2, 8, 16, dtype=dtype)
        cache[2] = torch.nan
        yield make.args(cache, make.tensor([5, 0, 3], torch.int64))
        yield make.args(cache, make.tensor([], torch.int64))
        for form in make.kv_formats:
            yield make.args(quantized.pack(cache, form), make.tensor([5, 0, 3], torch.int64))


@page_attention.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, group, dim in (
        (torch.float32, 8, 2, 4, 16),
        (torch.bfloat16, 16, 1, 8, 16),
        (torch.float32, 4, 3, 1, 16),
        (torch.bfloat16, 64, 2, 3, 64),
    ):
        lengths = (75, 9, 90) if size < 64 else (600, 70, 720)
        counts = (50, 0, 30)
        paged = make.paged(lengths, heads, size, dim, dtype=dtype)
        paged.k_cache[:, :, -1] = torch.nan
        row, slot, _ = paged.queries(counts)
        indices = torch.full((row.numel(), heads, 5), -1, dtype=torch.int32, device=row.device)
        for token, last in enumerate((slot // size).tolist()):
            chosen = min(last, token % 6)
            for head in range(heads):
                picked = make.randint(0, 1 << 30, last).argsort()[:chosen].sort().values
                indices[token, head, :chosen] = picked
        weights = make.rand(row.numel(), heads * group, 5)
        q = make.randn(row.numel(), heads * group, dim, dtype=dtype)
        caches = (paged.k_cache, paged.v_cache)
        yield make.args(q, *caches, row, paged.page_table, indices, weights)
        some = slice(40, 43)
        given = (row[some], paged.page_table, indices[some], weights[some])
        yield make.args(q[some], *caches, *given, 0.4)
        full = (indices >= 0).all(dim=-1).all(dim=-1).nonzero()[:1, 0]
        given = (row[full], paged.page_table, indices[full], weights[full])
        yield make.args(q[full], *caches, *given)
        none = torch.full_like(indices, -1)
        yield make.args(q, *caches, row, paged.page_table, none, weights)
        yield make.args(q[:0], *caches, row[:0], paged.page_table, none[:0], weights[:0])
        many = make.randint(0, row.numel(), TUNING.page_sharing_tokens + 9)
        given = (row[many], paged.page_table, indices[many], weights[many])
        yield make.args(q[many], *caches, *given)
        for form in make.kv_formats if size > 4 else ():
            bytes_of = paged.quantized(form)
            caches = (bytes_of.k_cache, bytes_of.v_cache)
            yield make.args(q[many], *caches, *given)
            yield make.args(
                q[some], *caches, row[some], paged.page_table, indices[some], weights[some]
            )


@page_weights.cases
def _(make: Make) -> Cases:
    scores, lse = make.randn(5, 4, 6, scale=5.0), make.randn(5, 4, scale=5.0)
    scores[0, :, 2:] = -torch.inf
    scores[1] = -torch.inf
    scores[2] = -torch.inf
    lse[2] = -torch.inf
    lse[3, 1] = -torch.inf
    scores[4, 0], lse[4, 0] = -200.0, -190.0
    for softmax1 in (False, True):
        yield make.args(scores, lse, softmax1)
        yield make.args(scores[:0], lse[:0], softmax1)
        yield make.args(scores[..., :1], lse, softmax1)


@prior_summary.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, group in (
        (torch.float32, 8, 2, 4),
        (torch.bfloat16, 16, 3, 1),
        (torch.float32, 2, 1, 2),
    ):
        cache = make.randn(9, heads, size, 16, dtype=dtype)
        cache[:, :, -1] = torch.nan
        query = make.randn(4, heads * group, 16, dtype=dtype, scale=3.0)
        pages = make.tensor([7, 0, 3, 8], torch.int64)
        yield make.args(query, cache, pages)
        yield make.args(query[:1], cache, pages[:1], 0.7)
        yield make.args(query[:0], cache, pages[:0])
        if size > 2:
            yield make.args(query, quantized.pack(cache), pages)


@select_pages.cases
def _(make: Make) -> Cases:
    for dtype, size, groups, group in (
        (torch.float32, 8, 2, 4),
        (torch.bfloat16, 4, 1, 8),
        (torch.float32, 4, 3, 1),
    ):
        heads = groups * group
        lengths, counts = (175, 9, 190, 31), (100, 9, 1, 2)
        paged = make.paged(lengths, groups, size, 16, dtype=dtype)
        row, slot, _ = paged.queries(counts)
        pages = paged.k_cache.shape[0]
        z = make.randn(row.numel(), heads, 16, dtype=dtype)
        key = make.randn(pages, heads, 16, dtype=dtype)
        key[paged.page_table[:, -1].long()] = torch.nan
        bias = make.rand(pages, heads) * 3
        lse = make.randn(row.numel(), heads)
        where = (row, slot, paged.page_table, size, 2 * size + 1, 3)
        yield make.args(z, key, bias, lse, *where, num_kv_heads=groups)
        yield make.args(z, key, bias, lse, *where[:-1], 500, num_kv_heads=groups)
        landmark = paged.k_cache[:, :, -1]
        few = slice(-32, None)  # of every row
        for strategy in STRATEGIES:
            given = (z[few], landmark, None, lse[few], row[few], slot[few], *where[2:])
            yield make.args(*given, strategy=strategy)
        # All scores are equal: integers, whose sums are exact in any order of addition.
        equal, whole = torch.ones_like(key), make.randint(-3, 4, *z.shape).to(dtype)
        yield make.args(whole, equal, None, lse, *where, num_kv_heads=groups)
        # Long rows with repeated pages: ties again, with few and with many blocks of candidates.
        fourths = make.randint(-8, 9, pages, heads, 16).to(dtype) / 4
        for width, topk in ((700, 3), (700, 20), (4200, 20)):
            table = make.randint(0, pages - 2, 2, width, dtype=torch.int32)
            some, last = make.randint(0, 2, 7), make.randint(500 * size, width * size, 7)
            far = (some, last, table, size, 2 * size + 1, topk)
            yield make.args(whole[:7], fourths, None, lse[:7], *far, num_kv_heads=groups)
        one = (row[-3:-2], slot[-3:-2], *where[2:])
        yield make.args(z[-3:-2], key, bias, lse[-3:-2], *one, 0.3, num_kv_heads=groups)
        # Head widths and group sizes that the CPU's tile loops take.
        wide, near = (make.randn(*x.shape[:2], 32, dtype=dtype) for x in (z, key))
        yield make.args(wide, near, bias, lse, *where, num_kv_heads=groups)
        yield make.args(wide, near[:, :groups], None, lse, *where)
        none = (row[:0], slot[:0], *where[2:])
        yield make.args(z[:0], key, bias, lse[:0], *none, num_kv_heads=groups)


@store_prior_summary.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, group in ((torch.float32, 8, 2, 4), (torch.bfloat16, 16, 3, 1)):
        cache = make.randn(9, heads, size, 16, dtype=dtype)
        query = make.randn(4, heads * group, 16, dtype=dtype, scale=3.0)
        keys = make.randn(9, heads * group, 16, dtype=dtype)
        biases = make.randn(9, heads * group)
        pages = make.tensor([7, 0, 3, 8], torch.int64)
        yield make.args(query, cache, pages, keys, biases)
        yield make.args(query, cache, pages, None, biases, 0.7)
        yield make.args(query, cache, pages, keys, None)
        yield make.args(query, cache, make.tensor([-1, 5, -1, 2], torch.int64), keys, biases)
        yield make.args(query[:1], cache, make.tensor([-1], torch.int64), keys, biases)
        yield make.args(query[:0], cache, pages[:0], keys, biases)
        yield make.args(query, quantized.pack(cache), pages, keys, biases)
