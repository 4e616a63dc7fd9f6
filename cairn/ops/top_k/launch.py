"""How the selection is launched: by the sizes of the rows, never by what is in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.early import early_option
from cairn.ops.top_k.kernels.select import bound_kernel, choose_kernel, list_kernel
from cairn.ops.top_k.selection import Rows

LEAST_ROOM = 4096
"""Candidates that one program takes at once, at least; half as many again as are chosen, since
lists hold some more than that."""
SAMPLES = (1 << 10, 1 << 12)
"""Fewest and most scores that are looked at for a bound."""
PART = 16
"""One score of so many is, between these."""
SURE = 4.0
"""Standard deviations by which a bound is lower than what the sample says."""
CHUNK = 1 << 10
"""Candidates that one program lists, if the lists of a row are not too many."""
MOST_LISTS, MOST_CHUNK = 1 << 10, 1 << 14
"""Of a row, but for those that have more of the longest lists: a count of one has 16 bits."""
LINE = 1 << 7
"""Scores of float32 that a warp loads at once."""
REGISTERS = 64
"""Of a thread that lists, and of one that chooses where rows share multiprocessors: more programs
lie beside each other. Equal scores, which most rows do not have, would take more."""


class Pages(NamedTuple):
    """A page table [Bq, n] int32, the first rows of its requests [Bq + 1] int32, and positions of
    a page."""

    table: Tensor
    bounds: Tensor
    size: int


class _Lists(NamedTuple):
    """What may be among the best of each row: see `bound_kernel` and `list_kernel`."""

    floors: Tensor
    lists: Tensor
    counts: Tensor


def accepts(rows: Rows) -> bool:
    """Rows that the kernels read."""
    near = rows.score.stride(1) == 1 or rows.score.shape[1] <= 1
    numbers = (rows.lengths, rows.starts)
    return near and all(x is None or x.is_contiguous() for x in numbers)


def select(rows: Rows, pages: Pages | None = None, offset: Tensor | None = None) -> Tensor:
    """[B, topk] int32: `selection.select`, through a page table or moved by an offset [B]."""
    score, lengths, starts, topk = rows
    batch, width = score.shape
    out = gpu.empty((batch, topk), torch.int32, score.device)
    if not batch:
        return out
    room = max(LEAST_ROOM, gpu.next_power_of_2(topk + topk // 2))
    room = min(room, gpu.next_power_of_2(max(32, width)))
    floors, lists, counts = None, None, None
    chunk = max(CHUNK, min(MOST_CHUNK, gpu.next_power_of_2(max(1, width)) // MOST_LISTS))
    chunks = -(-width // chunk)
    early = gpu.launches_early(score.device)
    if width > room:
        floors, lists, counts = _list(rows, room, chunk, early)
    table, bounds, size = (None, None, 1) if pages is None else pages
    requests = 0 if table is None else table.shape[0]
    early = early and lists is not None
    choose_kernel[(batch,)](
        *(score, lengths, starts, floors, lists, counts, table, bounds, offset, out),
        *(score.stride(0), width, chunks, topk),
        *(0 if table is None else table.stride(0), requests, size, room, chunk),
        *(gpu.next_power_of_2(x) for x in (chunks, topk, requests + 1)),
        early,
        num_warps=_warps(room),
        **({"maxnreg": REGISTERS} if batch > gpu.processors(score.device) else {}),
        **early_option(early),
    )
    return out


def _list(rows: Rows, room: int, chunk: int, early: bool) -> _Lists:
    """Lists of all rows that have more than `room` candidates."""
    score, lengths, starts, topk = rows
    batch, width = score.shape
    chunks = -(-width // chunk)
    found = _Lists(
        gpu.empty((batch,), score.dtype, score.device),
        gpu.empty((batch, chunks, chunk), lengths.dtype, score.device),
        gpu.empty((batch, chunks), lengths.dtype, score.device),
    )
    sample = min(SAMPLES[1], max(SAMPLES[0], gpu.next_power_of_2(width // PART)))
    bound_kernel[(batch,)](
        *(score, lengths, starts, found.floors, score.stride(0), width, topk),
        *(room, sample, SURE, early),
        num_warps=_warps(sample),
    )
    list_kernel[(batch, chunks)](
        *(score, lengths, starts, *found, score.stride(0), width, room, chunk, LINE, early),
        num_warps=_warps(chunk),
        maxnreg=REGISTERS,
        **early_option(early),
    )
    return found


def _warps(block: int) -> int:
    return max(1, min(32, block // 256))
