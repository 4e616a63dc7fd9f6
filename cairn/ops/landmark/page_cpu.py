"""Page-major attention on the CPU: pages are multiplied with all tokens that select them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.ops import cpu
from cairn.ops.attention import paging
from cairn.ops.landmark import loops
from cairn.ops.landmark.tuning import TUNING


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    page_table: Tensor,
    indices: Tensor,
    weights: Tensor,
    scale: float | None,
) -> Tensor:
    """page_attention, with the same arguments and result."""
    out = q.new_empty(q.shape, dtype=torch.float32)
    alone = []
    for begin in range(0, q.shape[0], TUNING.cpu_span):
        at = slice(begin, begin + TUNING.cpu_span)
        pages = _common_pages(row[at], indices[at])
        if pages is None:
            end = min(begin + TUNING.cpu_span, q.shape[0])
            alone.append(torch.arange(begin, end, device=q.device))
            continue
        _run_span(
            q[at],
            k_cache,
            v_cache,
            page_table[row[begin]],
            indices[at],
            weights[at],
            pages,
            scale,
            out[at],
        )
    if alone:
        some = torch.cat(alone)
        out[some] = _by_page(
            q[some],
            k_cache,
            v_cache,
            row[some],
            page_table,
            indices[some],
            weights[some],
            scale,
        )
    return out


def _common_pages(row: Tensor, indices: Tensor) -> Tensor | None:
    """All logical pages that a span selects, ascending: [U] int64; None if it shares too few."""
    if bool((row != row[0]).any()):
        return None
    times = torch.bincount(indices.flatten().clamp(min=-1) + 1)[1:]
    pages = times.nonzero()[:, 0]
    pairs = pages.numel() * indices.shape[0] * indices.shape[1]
    return pages if pairs <= TUNING.cpu_waste * int(times.sum()) else None


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
    """Write to `out` the tokens of one row, against all of `pages`; pages that a token did not
    select have weight 0.

    Args:
        table: [max_pages] int32, the row's physical pages; pages: [U] int64, logical.
    """
    _, heads, size, dim = k_cache.shape
    width, topk = pages.numel(), indices.shape[-1]
    physical = table[pages].long().unsqueeze(0)
    k, v = (paging.gather_pages(cache, physical)[0] for cache in (k_cache, v_cache))
    v.unflatten(1, (width, size))[:, :, -1] = 0
    keys = k.float().mul_(dim**-0.5 if scale is None else scale).transpose(1, 2)
    # One extra column collects the weights of empty entries.
    place = torch.where(indices < 0, width, torch.searchsorted(pages, indices.long())).unsqueeze(2)
    # Block size by the memory of scores and their softmax. Few different shapes, because the
    # library builds a product kernel for each.
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
    """Page by page, with tiles of the tokens that select it: [T, h_q, d] float32."""
    tokens, query_heads, dim = q.shape
    _, heads, size, _ = k_cache.shape
    group, topk = query_heads // heads, indices.shape[-1]
    # A request is a (token, KV head, position in the selection); requests are sorted by (physical
    # page, KV head).
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
    for rows in TUNING.cpu_tile_rows:
        places = max(1, rows // group)
        full = counts // places
        if rows == TUNING.cpu_tile_rows[-1]:
            full = full + (counts % places > 0)
        tile = torch.repeat_interleave(full)
        rank = torch.arange(tile.numel(), device=tile.device) - (full.cumsum(0) - full)[tile]
        first = start[tile] + rank * places
        filled = (counts[tile] - rank * places).clamp(max=places)
        step = paging.tokens_per_block(8 * places * group * size, tile.numel())
        for begin in range(0, tile.numel(), step):
            at = slice(begin, begin + step)
            _run_tiles(
                q,
                k_cache,
                v_cache,
                lines[tile[at]],
                first[at],
                filled[at],
                query,
                weight,
                places,
                scale,
                out,
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
    place = torch.arange(places, device=line.device)
    position = (first.unsqueeze(1) + place).clamp(max=query.numel() - 1).flatten()
    asked = query.index_select(0, position)
    factor = np.float32(dim**-0.5 if scale is None else scale)
    wanted = q.new_empty((count, places * group, dim), dtype=torch.float32)
    by_token = q.reshape(q.shape[0] * heads, -1)
    loops.take_queries(*map(cpu.as_array, (by_token, asked)), factor, _lines(wanted, group))
    k, v = (
        cache.view(-1, size * dim).index_select(0, line).view(count, size, dim)
        for cache in (k_cache, v_cache)
    )
    scores = torch.bmm(wanted, k.float().transpose(1, 2))
    shares = v.new_empty(scores.shape)
    given = (scores.view(-1, size), weight, position, shares.view(-1, size))
    loops.weigh(*map(cpu.as_array, given))
    v[:, -1] = 0
    o = torch.bmm(shares, v)
    target = torch.where(place < filled.unsqueeze(1), asked.view(count, places), -1)
    parts = torch.get_num_threads()
    loops.add_lines(_lines(o, group), *map(cpu.as_array, (target.view(-1), out)), parts)


def _lines(rows: Tensor, group: int) -> NDArray[Any]:
    """Rows [n, m G, d] as lines [n m, G d] for loops."""
    return cpu.as_array(rows.view(-1, group * rows.shape[-1]))
