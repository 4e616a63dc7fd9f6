"""Attention over a sliding window of the paged cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.attention import launch, loops, paging, tile_loops, window_wgmma_launch
from cairn.ops.attention import tiles as tiling
from cairn.ops.call import Call
from cairn.ops.checks import check_caches, check_dtype, check_least, check_queries, check_slots
from cairn.ops.cpu import amx
from cairn.ops.registry import op

_WIDEST = 1 << 14
"""Largest window, in slots, for tiles with a mask."""


@op
def window_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    slot: Tensor,
    page_table: Tensor,
    window: int,
    scale: float | None = None,
    aligned: bool = False,
    mask_landmarks: bool = False,
    dtype: torch.dtype | None = None,
    chunked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every token over its last slots.

    A token at slot s sees slots max(lo, 0) .. s, lo = s - window + 1, or with `aligned` that slot's
    page start, S * floor((s - window + 1) / S) (the window of a HiLS layer).

    Args:
        q: [T, h_q, d].
        k_cache, v_cache: [pages, h_kv, S, d], or quantized; query head h reads KV head
            h // (h_q // h_kv).
        row, slot: [T] int64. Slots 0 .. slot of the row are written.
        page_table: [rows, max_pages] int32, logical to physical page.
        window: slots, >= 1.
        scale: of the dot products; None: d ** -0.5.
        aligned: start the window at a page.
        mask_landmarks: the last slot of every page is no key.
        dtype: of o; None: float32.
        chunked: the tokens are chunks of rows, dozens side by side, and not each of another row: a
            hint how to cut them, whatever they are.
    Returns:
        (o [T, h_q, d], lse [T, h_q] float32); a token without a visible key has o = 0, lse = -inf.
    Raises:
        BadArgument: for another shape, dtype, device, layout or window.
    """
    _, heads, size, dim = k_cache.shape
    first = slot - (window - 1)
    if aligned:
        first = first // size * size
    page = first.clamp(min=0) // size
    width = min((window + size - 2) // size + 1, page_table.shape[1])
    block = paging.tokens_per_block(4 * heads * dim * width * size, q.shape[0])
    parts = [
        paging.attend_span(
            query,
            k_cache,
            v_cache,
            row=in_row,
            first=low,
            slot=high,
            page_table=page_table,
            page=begin,
            width=width,
            scale=scale,
            mask_landmarks=mask_landmarks,
        )
        for query, in_row, low, high, begin in zip(
            *(x.split(block) for x in (q, row, first, slot, page)), strict=True
        )
    ]
    o, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return o.to(dtype or torch.float32), lse


@window_attention.check
def _(call: Call) -> None:
    name = "window_attention"
    _, kv_heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.q)
    tokens, _ = check_queries(name, "q", call.q, kv_heads, dim)
    check_slots(name, tokens, call.row, call.slot, call.page_table, call.q)
    check_least(name, "window", call.window, 1)
    check_dtype(name, call.dtype)


@window_attention.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    o = call.q.new_empty(call.q.shape, dtype=call.dtype or torch.float32)
    return o, call.q.new_empty(call.q.shape[:2], dtype=torch.float32)


@window_attention.implementation(
    "numba",
    devices=cpu.DEVICES,
    when=lambda call: tiling.few_in_loops(call.q, call.k_cache, call.v_cache, call.row),
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    o = call.q.new_empty(call.q.shape, dtype=call.dtype or torch.float32)
    lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
    loops.attend_windows(
        *map(
            cpu.numbers,
            (call.q.contiguous(), call.k_cache, call.v_cache, call.row, call.slot, call.page_table),
        ),
        (call.window, call.aligned, call.mask_landmarks),
        np.float32(call.q.shape[2] ** -0.5 if call.scale is None else call.scale),
        *map(cpu.numbers, (o, lse)),
    )
    return o, lse


def _accepts(call: Call) -> bool:
    # With a window of 1 a landmark may see nothing, which the flash kernel reports differently; the
    # mask of a tile grows with the window.
    return (
        tiling.worthwhile(call.q, call.k_cache, call.row)
        and (call.aligned or call.window > 1)
        and call.window <= _WIDEST
    )


def _by_amx(call: Call) -> bool:
    fits = tiling.amx_takes(
        call.q, call.k_cache, call.v_cache, call.scale, call.row, call.slot, call.page_table
    )
    return fits and call.dtype in (None, torch.float32, torch.bfloat16)


@window_attention.implementation(
    "amx", devices=("cpu",), dtypes=(torch.bfloat16,), missing=amx.MISSING, when=_by_amx
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    o = call.q.new_empty(call.q.shape, dtype=call.dtype or torch.float32)
    lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
    tile_loops.attend_blocks(
        cpu.numbers(call.q.contiguous().view(torch.float32)),
        *map(cpu.numbers, (call.k_cache, call.v_cache, call.row, call.slot, call.page_table)),
        tiling.blocks(call.row, call.slot, tile_loops.BLOCK),
        (call.window, call.aligned, call.mask_landmarks),
        np.float32(call.q.shape[2] ** -0.5 if call.scale is None else call.scale),
        amx.shapes(),
        *map(cpu.numbers, (o, lse)),
    )
    return o, lse


@window_attention.implementation("tiled", devices=("cpu",), when=_accepts)
def _(call: Call) -> tuple[Tensor, Tensor]:
    tokens, query_heads, dim = call.q.shape
    _, heads, page_size, _ = call.k_cache.shape
    size = tiling.tile_size(page_size, query_heads // heads, tokens, 512)
    found = tiling.cut(call.row, call.slot, size)
    if found is None:
        return window_attention.reference(
            *(call.q, call.k_cache, call.v_cache, call.row, call.slot, call.page_table),
            *(call.window, call.scale, call.aligned, call.mask_landmarks, call.dtype),
        )
    tiles, rest = found
    # One line more than tokens takes what empty cells of the tiles compute.
    out = call.q.new_empty(tokens + 1, query_heads, dim, dtype=call.dtype or torch.float32)
    lse = call.q.new_empty(tokens + 1, query_heads, dtype=torch.float32)
    if tiles.row.numel():
        back = min(-((1 - call.window) // page_size), int(tiles.start.max()) // page_size)
        hidden = _hidden(size, back, page_size, call.window, call.aligned, call.mask_landmarks)
        mask = tiling.additive(hidden, call.q.dtype).repeat_interleave(query_heads // heads, dim=0)
        keys = back * page_size + size
        step = paging.tokens_per_block(
            heads * keys * dim * call.q.element_size(), tiles.row.numel()
        )
        early = tiles.start < back * page_size
        for which in (early.nonzero()[:, 0], (~early).nonzero()[:, 0]):
            for at in which.split(step) if which.numel() else ():
                _run_tiles(
                    *(call.q, call.k_cache, call.v_cache, tiles.take(at), call.page_table, back),
                    *(mask, call.scale, out, lse),
                )
    if rest.numel():
        out[rest], lse[rest] = window_attention.reference(
            *(
                call.q[rest],
                call.k_cache,
                call.v_cache,
                call.row[rest],
                call.slot[rest],
                call.page_table,
            ),
            *(call.window, call.scale, call.aligned, call.mask_landmarks, call.dtype),
        )
    return out[:tokens], lse[:tokens]


def _hidden(
    size: int, back: int, page_size: int, window: int, aligned: bool, mask_landmarks: bool
) -> Tensor:
    """Keys of a tile's span that its queries do not see, [size, L] bool; the same in every tile."""
    query = torch.arange(size, device="cpu").unsqueeze(1)
    key = torch.arange(-back * page_size, size, device="cpu")
    first = query - (window - 1)
    if aligned:
        first = first // page_size * page_size
    hidden = (key > query) | (key < first)
    return hidden | paging.is_landmark(key, page_size) if mask_landmarks else hidden


def _run_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: tiling.Tiles,
    page_table: Tensor,
    back: int,
    mask: Tensor,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend the tiles' queries over their pages and `back` pages before; write out and lse."""
    _, heads, page_size, dim = k_cache.shape
    count, size = tiles.grid.shape
    start = tiles.start - back * page_size
    length = back * page_size + size
    slots = torch.arange(length, device=start.device)
    logical = (start // page_size).unsqueeze(1) + slots[: length // page_size]
    logical = logical.clamp(min=0, max=page_table.shape[1] - 1)
    pages = page_table[tiles.row.unsqueeze(1), logical].long()
    key = start.unsqueeze(1) + slots
    # Slots that no token of the tile sees may hold anything: their pages may be another row's.
    group = out.shape[1] // heads
    tokens = (tiles.grid < q.shape[0]).float()
    absent = (tokens @ (mask[::group] == 0).float() == 0) | (key < 0)
    k, v = (
        paging.gather_pages(cache, pages).masked_fill_(absent[:, None, :, None], 0)
        for cache in (k_cache, v_cache)
    )
    shape = (count * heads, 1, length, dim)
    seen = mask.view(1, 1, *mask.shape)
    if int(start.min()) < 0:
        before = tiling.additive(key < 0, q.dtype).repeat_interleave(heads, dim=0)
        seen = seen + before[:, None, None]
    index = tiling.cells(tiles.grid, heads)
    o, part = tiling.flash(
        tiling.queries(q, index, heads), k.view(shape), v.view(shape), seen, scale
    )
    flat = index.reshape(-1)
    out.view(-1, group * dim).index_copy_(0, flat, o.to(out.dtype).reshape(-1, group * dim))
    lse.view(-1, group).index_copy_(0, flat, part.reshape(-1, group))


def _in_splits(call: Call) -> bool:
    return not launch.in_tiles(call.q, call.k_cache.shape[1], call.chunked) and launch.accepts(
        call.q, call.k_cache, call.v_cache
    )


window_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 1e-2)},
    "the flash kernel rounds probabilities and o, amx probabilities, to bfloat16; the definition "
    "stays in float32",
)


@window_attention.implementation(
    "triton_splits",
    devices=gpu.DEVICES,
    replayed=True,
    when=_in_splits,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return launch.attend_splits(_task(call), call.dtype or torch.float32)


def _task(call: Call) -> launch.Task:
    given = (call.q, call.k_cache, call.v_cache, call.row, call.slot, call.page_table)
    return launch.Task(*given, call.window, call.scale, call.aligned, call.mask_landmarks)


def _in_groups(call: Call) -> bool:
    task = _task(call)
    return window_wgmma_launch.fits(task) and window_wgmma_launch.worthwhile(task)


@window_attention.implementation(
    "gluon",
    devices=gpu.DEVICES,
    replayed=True,
    when=_in_groups,
    missing="" if gpu.gl else "needs Triton 3.6",
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return window_wgmma_launch.attend(_task(call), call.dtype or torch.float32)


@window_attention.implementation(
    "triton_tiles",
    devices=gpu.DEVICES,
    replayed=True,
    when=lambda call: launch.accepts(call.q, call.k_cache, call.v_cache),
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return launch.attend_tiles(_task(call), call.dtype or torch.float32)
