"""Attention inside the selected pages, each page on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.attention import launch, paging
from cairn.ops.benching import Alternative, Draw, Point, Points, moved
from cairn.ops.cache import quantized
from cairn.ops.checks import FLOAT32, INT32, check_caches, check_queries, check_slots, expect
from cairn.ops.landmark import loops, page_launch
from cairn.ops.landmark.looks import check_keys
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

_TILE_ROWS = (512, 64)
"""Query rows (queries x G) of the page-major tiles; the smaller ones take what is left over."""
_SPAN = 128
"""Consecutive tokens that may be computed against all pages any of them selects."""
_WASTE = 1.6
"""Most (token, page) pairs of a span to compute per selected pair; beyond, page by page."""


@op
def page_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> Tensor:
    """o = sum over selected pages j of w_j A_j, A_j the softmax attention inside page j.

    The last slot of a page is no key.

    Args:
        q: [T, h_q, d].
        k_cache, v_cache: [pages, h_kv, S, d], or quantized; query head h reads KV head
            h // (h_q // h_kv).
        row: [T] int64.
        page_table: [rows, max_pages] int32, logical to physical page.
        indices: [T, h_kv, K] int32, logical pages; a negative one is no page.
        weights: [T, h_q, K] float32, in the order of `indices`.
        scale: of the dot products; None: d ** -0.5.
    Returns:
        [T, h_q, d] float32.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    (heads, size), dim = k_cache.shape[1:3], q.shape[2]
    topk = indices.shape[-1]
    factor = dim**-0.5 if scale is None else scale
    head = torch.arange(heads, device=q.device).unsqueeze(1)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    block = paging.tokens_per_block(16 * heads * topk * size * dim, q.shape[0])
    for begin in range(0, q.shape[0], block):
        at = slice(begin, begin + block)
        logical = indices[at]
        none = logical < 0
        pages = page_table[row[at, None, None], logical.clamp(min=0).long()].long()
        k = _gather(k_cache, pages, head).view(-1, topk * size, dim)
        v = _gather(v_cache, pages, head)
        query = (q[at].float() * factor).view(k.shape[0], -1, dim)
        scores = torch.bmm(query, k.float().transpose(1, 2)).unflatten(-1, (topk, size))
        scores[..., -1] = -torch.inf
        v[:, :, -1] = 0
        p = torch.softmax(scores, dim=-1)
        p *= weights[at].view(*p.shape[:3], 1)
        if bool(none.any()):
            none = none.view(-1, 1, topk, 1)
            p.masked_fill_(none, 0)
            v.masked_fill_(none.view(-1, topk, 1, 1), 0)
        out[at] = torch.bmm(p.flatten(2), v.view_as(k).float()).view(-1, *q.shape[1:])
    return out


@page_attention.check
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> None:
    name = "page_attention"
    _, kv_heads, _, dim = check_caches(name, k_cache, v_cache, q)
    check_keys(name, k_cache)
    tokens, heads = check_queries(name, "q", q, kv_heads, dim)
    check_slots(name, tokens, row, None, page_table, q)
    expect(name, "indices", indices, (tokens, kv_heads, None), INT32, q)
    expect(name, "weights", weights, (tokens, heads, indices.shape[2]), FLOAT32, q)


@page_attention.fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> Tensor:
    return q.new_empty(q.shape, dtype=torch.float32)


def _gather(cache: Tensor, pages: Tensor, head: Tensor) -> Tensor:
    """The page in each of K places, of its KV head: pages [T, h_kv, K] -> [T * h_kv, K, S, d]."""
    _, heads, size, dim = cache.shape
    if quantized.is_quantized(cache):
        return quantized.take(cache, pages, head).flatten(0, 1)
    if not cache.is_contiguous():
        return cache[pages, head].flatten(0, 1)
    lines = cache.view(-1, size * dim).index_select(0, (pages * heads + head).view(-1))
    return lines.view(-1, pages.shape[-1], size, dim)


def _shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> bool:
    """Whether pages are likely to be selected by several tokens."""
    return (
        q.shape[0] > 32
        and k_cache.shape[2] > 1
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and q.dtype == k_cache.dtype
    )


@page_attention.implementation("page_major", devices=cpu.DEVICES, when=_shared)
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Spans of tokens with much the same pages at once, all other tokens page by page."""
    out = q.new_empty(q.shape, dtype=torch.float32)
    alone = []
    for begin in range(0, q.shape[0], _SPAN):
        at = slice(begin, begin + _SPAN)
        pages = _common_pages(row[at], indices[at])
        if pages is None:
            alone.append(torch.arange(begin, min(begin + _SPAN, q.shape[0])))
            continue
        _run_span(
            *(q[at], k_cache, v_cache, page_table[row[begin]], indices[at], weights[at]),
            *(pages, scale, out[at]),
        )
    if alone:
        some = torch.cat(alone)
        out[some] = _by_page(
            *(q[some], k_cache, v_cache, row[some], page_table, indices[some], weights[some]),
            scale,
        )
    return out


def _common_pages(row: Tensor, indices: Tensor) -> Tensor | None:
    """All logical pages that a span selects, ascending: [U] int64; None if it shares too few."""
    if bool((row != row[0]).any()):
        return None
    times = torch.bincount(indices.flatten() + 1)[1:]
    pages = times.nonzero()[:, 0]
    pairs = pages.numel() * indices.shape[0] * indices.shape[1]
    return pages if pairs <= _WASTE * int(times.sum()) else None


def _run_span(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    indices: Tensor,
    weights: Tensor,
    pages: Tensor,
    scale: float | None,
    out: Tensor,
) -> None:
    """Write to `out` the tokens of one row, against all of `pages`; a page not selected weighs 0.

    Args:
        table: [max_pages] int32, the row's physical pages; pages: [U] int64, logical.
    """
    _, heads, size, dim = k_cache.shape
    width, topk = pages.numel(), indices.shape[-1]
    physical = table[pages].long().unsqueeze(0)
    k, v = (paging.gather_pages(cache, physical)[0] for cache in (k_cache, v_cache))
    v.unflatten(1, (width, size))[:, :, -1] = 0
    keys = k.float().mul_(dim**-0.5 if scale is None else scale).transpose(1, 2)
    # One column more than pages takes the weights of empty places.
    place = torch.where(indices < 0, width, torch.searchsorted(pages, indices.long())).unsqueeze(2)
    # Scores and their softmax fill the budget; few different shapes, for each has a product made
    # for it.
    step = paging.tokens_per_block(8 * out.shape[1] * width * size, q.shape[0])
    step = 1 << step.bit_length() - 1
    for begin in range(0, q.shape[0], step):
        at = slice(begin, begin + step)
        query = q[at].unflatten(1, (heads, -1)).transpose(0, 1)
        count, group = query.shape[1:3]
        weight = weights.new_zeros(count, heads, group, width + 1)
        given = weights[at].unflatten(1, (heads, group))
        weight.scatter_add_(3, place[at].expand(-1, -1, group, topk), given)
        scores = torch.bmm(query.reshape(heads, -1, dim).float(), keys)
        scores = scores.view(heads, count, group, width, size)
        scores[..., -1] = -torch.inf
        p = torch.softmax(scores, dim=-1).mul_(weight[..., :-1].transpose(0, 1).unsqueeze(-1))
        o = torch.bmm(p.to(v.dtype).view(heads, count * group, -1), v)
        out[at].unflatten(1, (heads, group)).copy_(o.view(query.shape).transpose(0, 1))


def _by_page(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None,
) -> Tensor:
    """Every page with the tokens that select it, in tiles: [T, h_q, d] float32."""
    tokens, query_heads, dim = q.shape
    _, heads, size, _ = k_cache.shape
    group, topk = query_heads // heads, indices.shape[-1]
    # A request is a (token, KV head, place); sorted by (physical page, KV head).
    flat = indices.flatten()
    request = (flat >= 0).nonzero()[:, 0]
    query = request // topk
    page = page_table[row[query // heads], flat[request].long()].long()
    line, order = (page * heads + query % heads).sort()
    query = query[order]
    weight = weights.view(tokens, heads, group, topk).transpose(2, 3).reshape(-1, group)
    weight = weight.index_select(0, request[order])
    out = q.new_zeros(tokens * heads, group * dim, dtype=torch.float32)
    lines, counts = torch.unique_consecutive(line, return_counts=True)
    start = counts.cumsum(0) - counts
    for rows in _TILE_ROWS:
        places = max(1, rows // group)
        full = counts // places
        if rows == _TILE_ROWS[-1]:
            full = full + (counts % places > 0)
        tile = torch.repeat_interleave(full)
        rank = torch.arange(tile.numel()) - (full.cumsum(0) - full)[tile]
        first = start[tile] + rank * places
        filled = (counts[tile] - rank * places).clamp(max=places)
        step = paging.tokens_per_block(8 * places * group * size, tile.numel())
        for begin in range(0, tile.numel(), step):
            at = slice(begin, begin + step)
            _run_tiles(
                *(q, k_cache, v_cache, lines[tile[at]], first[at], filled[at]),
                *(query, weight, places, scale, out),
            )
        start = start + full * places
        counts = (counts - full * places).clamp(min=0)
    return out.view(tokens, query_heads, dim)


def _run_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    line: Tensor,
    first: Tensor,
    filled: Tensor,
    query: Tensor,
    weight: Tensor,
    places: int,
    scale: float | None,
    out: Tensor,
) -> None:
    """Add to `out` the requests first .. first + filled - 1 of every tile, all on one page."""
    _, heads, size, dim = k_cache.shape
    count, group = line.numel(), weight.shape[1]
    place = torch.arange(places)
    position = (first.unsqueeze(1) + place).clamp(max=query.numel() - 1).flatten()
    asked = query.index_select(0, position)
    factor = np.float32(dim**-0.5 if scale is None else scale)
    wanted = torch.empty((count, places * group, dim), dtype=torch.float32)
    by_token = q.reshape(q.shape[0] * heads, -1)
    loops.take_queries(*map(cpu.numbers, (by_token, asked)), factor, _lines(wanted, group))
    k, v = (
        cache.view(-1, size * dim).index_select(0, line).view(count, size, dim)
        for cache in (k_cache, v_cache)
    )
    scores = torch.bmm(wanted, k.float().transpose(1, 2))
    shares = torch.empty(scores.shape, dtype=v.dtype)
    given = (scores.view(-1, size), weight, position, shares.view(-1, size))
    loops.weigh(*map(cpu.numbers, given))
    v[:, -1] = 0
    o = torch.bmm(shares, v)
    target = torch.where(place < filled.unsqueeze(1), asked.view(count, places), -1)
    parts = torch.get_num_threads()
    loops.add_lines(_lines(o, group), *map(cpu.numbers, (target.view(-1), out)), parts)


def _lines(rows: Tensor, group: int) -> NDArray[Any]:
    """Rows [n, m G, d] as lines [n m, G d] for loops."""
    return cpu.numbers(rows.view(-1, group * rows.shape[-1]))


page_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 1e-2)},
    "page_major rounds probabilities and A_j to bfloat16, the definition stays in float32",
)


def _on_gpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> bool:
    return (
        launch.accepts(q, k_cache, v_cache)
        and indices.is_contiguous()
        and weights.is_contiguous()
        and k_cache.shape[2] > 1
    )


def _sorted_on_gpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> bool:
    given = (q, k_cache, v_cache, row, page_table, indices, weights)
    return q.shape[0] >= page_launch.SHARING_TOKENS and _on_gpu(*given)


def _pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> page_launch.Pages:
    factor = q.shape[2] ** -0.5 if scale is None else scale
    given = (q, k_cache, v_cache, row, page_table, indices, weights)
    return page_launch.Pages(*given, factor)


@page_attention.implementation("triton_sorted", devices=gpu.DEVICES, when=_sorted_on_gpu)
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Page by page, with the tokens that selected it."""
    job = _pages(q, k_cache, v_cache, row, page_table, indices, weights, scale)
    return page_launch.attend_sorted(job)


@page_attention.implementation("triton_few", devices=gpu.DEVICES, when=_on_gpu)
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Every token reads its own pages; few tokens share a token's pages among programs."""
    job = _pages(q, k_cache, v_cache, row, page_table, indices, weights, scale)
    return page_launch.attend_few(job)


@page_attention.cases
def _(make: Make) -> Cases:
    for dtype, size, heads, group in (
        (torch.float32, 8, 2, 4),
        (torch.bfloat16, 16, 1, 8),
        (torch.float32, 4, 3, 1),
    ):
        lengths, counts = (75, 9, 90), (50, 0, 30)
        paged = make.paged(lengths, heads, size, 16, dtype=dtype)
        paged.k_cache[:, :, -1] = torch.nan
        row, slot, _ = paged.queries(counts)
        indices = torch.full((row.numel(), heads, 5), -1, dtype=torch.int32, device=row.device)
        for token, last in enumerate((slot // size).tolist()):
            chosen = min(last, token % 6)
            for head in range(heads):
                picked = make.randint(0, 1 << 30, last).argsort()[:chosen].sort().values
                indices[token, head, :chosen] = picked
        weights = make.rand(row.numel(), heads * group, 5)
        q = make.randn(row.numel(), heads * group, 16, dtype=dtype)
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
        many = make.randint(0, row.numel(), page_launch.SHARING_TOKENS + 9)
        given = (row[many], paged.page_table, indices[many], weights[many])
        yield make.args(q[many], *caches, *given)
        if size > 4:
            bytes_of = paged.quantized()
            caches = (bytes_of.k_cache, bytes_of.v_cache)
            yield make.args(q[many], *caches, *given)
            yield make.args(
                q[some], *caches, row[some], paged.page_table, indices[some], weights[some]
            )


@page_attention.bench
def _(draw: Draw) -> Points:
    definition = Alternative("definition", page_attention.reference)
    for job in draw.attention():
        layer, (key, bias) = job.layer, draw.summaries(job)
        lse = draw.randn(*job.q.shape[:2], dtype=torch.float32)
        for name, z in draw.landmark_queries(job):
            where, rule = (job.row, job.slot, job.page_table), (layer.window, layer.topk)
            indices, scores = select_pages(
                *(z, key, bias, lse, *where, layer.page_size, *rule), num_kv_heads=layer.kv_heads
            )
            weights = torch.softmax(scores, dim=-1)
            yield Point(
                f"{job}{name}",
                draw.args(
                    *(job.q, job.k_cache, job.v_cache, job.row, job.page_table, indices, weights)
                ),
                job.selected_bytes + moved(job.q, job.q, indices, weights),
                job.attend_flops(job.q.shape[0] * layer.topk * (layer.page_size - 1)),
                # For many tokens it takes seconds.
                (definition,) if job.step.tokens == 1 else (),
            )
