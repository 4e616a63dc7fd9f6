"""Dense attention of tiles of consecutive tokens, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.attention import tiles as tiling
from cairn.ops.attention.merge_states import merged
from cairn.ops.attention.tuning import TUNING


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: tiling.Tiles,
    page_table: Tensor,
    scale: float | None,
    mask_landmarks: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend tiles (longest first) over their own pages, then backwards; write out and lse."""
    _, heads, page_size, dim = k_cache.shape
    count, size = tiles.grid.shape
    index = tiling.cells(tiles.grid, heads)
    query = tiling.queries(q, index, heads)
    group = out.shape[1] // heads

    slots = torch.arange(size, device=q.device)
    hidden = slots > slots.unsqueeze(1)
    mask = tiling.additive(hidden, q.dtype).repeat_interleave(group, dim=0)[None, None]
    o, part = _span(
        *(query, k_cache, v_cache, tiles, page_table, tiles.start),
        *(size, mask, scale, mask_landmarks),
    )
    o = o.float()
    pages = max(1, TUNING.paging_block_bytes // (4 * heads * page_size * dim * count))
    width = page_size * max(size // page_size, min(pages, 1024 // page_size))
    for far in range(width, int(tiles.start[0]) + width, width):
        active = int((tiles.start > far - width).sum())
        lines = slice(0, active * heads)
        begin = tiles.start[:active] - far
        o[lines], part[lines] = merged(
            o[lines],
            part[lines],
            *_span(
                *(query[lines], k_cache, v_cache, tiles.take(slice(0, active)), page_table),
                *(begin, width, None, scale, mask_landmarks),
            ),
        )
    flat = index.reshape(-1)
    out.view(-1, group * dim).index_copy_(0, flat, o.reshape(-1, group * dim))
    lse.view(-1, group).index_copy_(0, flat, part.reshape(-1, group))


def _span(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: tiling.Tiles,
    page_table: Tensor,
    begin: Tensor,
    length: int,
    mask: Tensor | None,
    scale: float | None,
    mask_landmarks: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of the tiles over slots begin .. begin + length - 1, those below 0 left out."""
    _, heads, page_size, dim = k_cache.shape
    slots = torch.arange(length, device=begin.device)
    logical = (begin // page_size).unsqueeze(1) + slots[: length // page_size]
    logical = logical.clamp(min=0, max=page_table.shape[1] - 1)
    pages = page_table[tiles.row.unsqueeze(1), logical].long()
    key = begin.unsqueeze(1) + slots
    absent = (key < 0) | (key > tiles.last.unsqueeze(1))
    if mask_landmarks:
        absent |= paging.is_landmark(key, page_size)
    if bool(absent.any()):
        hidden = tiling.additive(absent, query.dtype).repeat_interleave(heads, dim=0)
        keys_only = hidden[:, None, None]
        mask = keys_only if mask is None else mask + keys_only
    k, v = (
        paging.gather_pages(cache, pages).masked_fill_(absent[:, None, :, None], 0)
        for cache in (k_cache, v_cache)
    )
    shape = (-1, 1, length, dim)
    return tiling.flash(query, k.view(shape), v.view(shape), mask, scale)
