"""Window and dense attention on the CPU: loops for few tokens, AMX, and torch's flash kernel.

The functions take a call of `window_attention` or `dense_attention` with its arguments bound (both
use the same names), and the number of visible slots: `window` (`EVERYTHING` for dense attention),
extended to the start of a page if `aligned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu
from cairn.ops.attention import loops, paging, tile_loops
from cairn.ops.attention import tiles as tiling
from cairn.ops.attention.merge_states import merged
from cairn.ops.attention.tuning import TUNING
from cairn.ops.call import Call
from cairn.ops.cpu import amx

EVERYTHING = 1 << 62
"""A window that holds every slot."""
State = tuple[Tensor, Tensor]


def is_few(call: Call) -> bool:
    """Whether `attend_few` supports a call."""
    return tiling.few_in_loops(call.q, call.k_cache, call.v_cache, call.row)


def attend_few(call: Call, window: int, aligned: bool, dtype: torch.dtype) -> State:
    """Attention by Numba loops: (o [T, h_q, d] of `dtype`, lse [T, h_q] float32)."""
    o, lse = _results(call, dtype)
    loops.attend_windows(
        cpu.as_array(call.q.contiguous()),
        *map(cpu.as_array, _places(call)),
        (window, bool(aligned), bool(call.mask_landmarks)),
        _scale(call),
        *map(cpu.as_array, (o, lse)),
    )
    return o, lse


def has_amx(call: Call) -> bool:
    """Whether `attend_amx` supports a call."""
    where = (call.row, call.slot, call.page_table)
    return tiling.amx_takes(call.q, call.k_cache, call.v_cache, call.scale, *where)


def attend_amx(call: Call, window: int, aligned: bool, dtype: torch.dtype) -> State:
    """Blocks of consecutive tokens by AMX; results as in `attend_few`."""
    o, lse = _results(call, dtype)
    tile_loops.attend_blocks(
        cpu.as_array(call.q.contiguous().view(torch.float32)),
        *map(cpu.as_array, _places(call)),
        tiling.blocks(call.row, call.slot, tile_loops.BLOCK),
        (window, bool(aligned), bool(call.mask_landmarks)),
        _scale(call),
        amx.shapes(),
        *map(cpu.as_array, (o, lse)),
    )
    return o, lse


def _results(call: Call, dtype: torch.dtype) -> State:
    return call.q.new_empty(call.q.shape, dtype=dtype), call.q.new_empty(
        call.q.shape[:2], dtype=torch.float32
    )


def _places(call: Call) -> tuple[Tensor, ...]:
    # Numba compiles a loop anew for every array layout: pass a contiguous table.
    return call.k_cache, call.v_cache, call.row, call.slot, call.page_table.contiguous()


def _scale(call: Call) -> np.float32:
    return np.float32(call.q.shape[2] ** -0.5 if call.scale is None else call.scale)


@dataclass(frozen=True)
class Step:
    """A call cut into tiles, which read their keys in spans of slots.

    Attributes:
        call: as above.
        tiles: tiles of consecutive tokens, see `tiles`.
        query: [n * h_kv, 1, size * G, d], those of the tiles' cells.
    """

    call: Call
    tiles: tiling.Tiles
    query: Tensor

    def span(
        self,
        begin: Tensor,
        length: int,
        mask: Tensor | None,
        unread: Tensor,
        hidden: Tensor | None,
    ) -> State:
        """Attention of the first tiles over slots begin .. begin + length - 1 of their rows.

        Args:
            begin: [m] int64 for the first m tiles, multiples of the page size.
            mask: None, or added to the logits, as in `tiles.flash`.
            unread: [m, length] bool, slots whose memory may hold arbitrary values.
            hidden: [m, length] bool, further masked slots; or None.
        Returns:
            (o [m * h_kv, 1, size * G, d], lse [m * h_kv, 1, size * G]).
        """
        call, (_, heads, size, dim) = self.call, self.call.k_cache.shape
        logical = (begin // size).unsqueeze(1) + torch.arange(length // size, device=begin.device)
        logical = logical.clamp(min=0, max=call.page_table.shape[1] - 1)
        pages = call.page_table[self.tiles.row[: len(begin), None], logical].long()
        if hidden is not None:
            keys_only = tiling.additive(hidden, call.q.dtype).repeat_interleave(heads, dim=0)
            keys_only = keys_only[:, None, None]
            mask = keys_only if mask is None else mask + keys_only
        k, v = (
            paging.gather_pages(cache, pages).masked_fill_(unread[:, None, :, None], 0)
            for cache in (call.k_cache, call.v_cache)
        )
        shape = (-1, 1, length, dim)
        query = self.query[: len(begin) * heads]
        return tiling.flash(query, k.view(shape), v.view(shape), mask, call.scale)


Batches = Callable[[Call, tiling.Tiles], Iterator[tuple[Tensor, Callable[[Step], State]]]]


def attend_tiles(
    call: Call,
    rows: int,
    dtype: torch.dtype,
    batches: Batches,
    definition: Callable[[Call], State],
) -> State:
    """Tiles of consecutive tokens, and all other tokens by the definition; results as in
    `attend_few`.

    Args:
        rows: approximate number of queries per tile, times heads.
        batches: function from all tiles to pairs of tile indices and a function that computes (o,
            lse) of these tiles.
        definition: the op's definition.
    """
    (tokens, query_heads, dim), (_, heads, page_size, _) = call.q.shape, call.k_cache.shape
    group = query_heads // heads
    found = tiling.cut(call.row, call.slot, tiling.tile_size(page_size, group, tokens, rows))
    if found is None:
        return definition(call)
    tiles, rest = found
    # Padding cells of tiles write to one extra line after the tokens'.
    out = call.q.new_empty(tokens + 1, query_heads, dim, dtype=dtype)
    lse = call.q.new_empty(tokens + 1, query_heads, dtype=torch.float32)
    for at, attend in batches(call, tiles) if tiles.row.numel() else ():
        some = tiles.take(at)
        index = tiling.cells(some.grid, heads)
        o, part = attend(Step(call, some, tiling.queries(call.q, index, heads)))
        flat = index.reshape(-1)
        out.view(-1, group * dim).index_copy_(0, flat, o.to(dtype).reshape(-1, group * dim))
        lse.view(-1, group).index_copy_(0, flat, part.reshape(-1, group))
    if rest.numel():
        others = call.replaced(q=call.q[rest], row=call.row[rest], slot=call.slot[rest])
        o, lse[rest] = definition(others)
        out[rest] = o.to(dtype)
    return out[:tokens], lse[:tokens]


def windows(call: Call, tiles: tiling.Tiles) -> Iterator[tuple[Tensor, Callable[[Step], State]]]:
    """`batches` of window_attention: a tile reads its pages, and those before that it sees."""
    (_, heads, page_size, dim), size = call.k_cache.shape, tiles.grid.shape[1]
    group = call.q.shape[1] // heads
    back = min(-((1 - call.window) // page_size), int(tiles.start.max()) // page_size) * page_size
    query, key = (torch.arange(n, size, device="cpu") for n in (0, -back))
    query = query.unsqueeze(1)
    first = query - (call.window - 1)
    if call.aligned:
        first = first // page_size * page_size
    hidden = (key > query) | (key < first)
    if call.mask_landmarks:
        hidden |= paging.is_landmark(key, page_size)
    mask = tiling.additive(hidden, call.q.dtype).repeat_interleave(group, dim=0)[None, None]

    def attend(step: Step) -> State:
        begin = step.tiles.start - back
        before = begin.unsqueeze(1) + torch.arange(back + size, device="cpu") < 0
        # Slots that no token of the tile sees may hold any bits: their pages may belong to another
        # row.
        present = (step.tiles.grid < call.q.shape[0]).float()
        unread = (present @ (~hidden).float() == 0) | before
        return step.span(begin, back + size, mask, unread, before if begin.min() < 0 else None)

    count = paging.tokens_per_block(
        heads * (back + size) * dim * call.q.element_size(), tiles.row.numel()
    )
    early = tiles.start < back
    for which in (early.nonzero()[:, 0], (~early).nonzero()[:, 0]):
        for at in which.split(count) if which.numel() else ():
            yield at, attend


def everything(call: Call, tiles: tiling.Tiles) -> Iterator[tuple[Tensor, Callable[[Step], State]]]:
    """`batches` of dense_attention: a tile reads its own pages, then span by span those before."""
    (_, heads, page_size, dim), size = call.k_cache.shape, tiles.grid.shape[1]
    slots = torch.arange(size, device="cpu")
    causal = tiling.additive(slots > slots.unsqueeze(1), call.q.dtype)
    causal = causal.repeat_interleave(call.q.shape[1] // heads, dim=0)[None, None]

    def attend(step: Step) -> State:
        start, last = step.tiles.start, step.tiles.last

        def span(begin: Tensor, length: int, mask: Tensor | None) -> State:
            key = begin.unsqueeze(1) + torch.arange(length, device="cpu")
            absent = (key < 0) | (key > last[: len(begin)].unsqueeze(1))
            if call.mask_landmarks:
                absent |= paging.is_landmark(key, page_size)
            return step.span(begin, length, mask, absent, absent if absent.any() else None)

        o, lse = span(start, size, causal)
        o = o.float()
        pages = max(1, TUNING.paging_block_bytes // (4 * heads * page_size * dim * len(start)))
        width = page_size * max(size // page_size, min(pages, 1024 // page_size))
        for far in range(width, int(start[0]) + width, width):
            active = int((start > far - width).sum())
            lines = slice(0, active * heads)
            part = span(start[:active] - far, width, None)
            o[lines], lse[lines] = merged(o[lines], lse[lines], *part)
        return o, lse

    # Sort by length: tiles of one block then have similar lengths and few idle steps.
    order = tiles.start.argsort(descending=True)
    for at in order.split(max(1, 2048 // size)):
        yield at, attend
