"""How the selection is launched: by the sizes of the rows, never by what is in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.topk.kernels import choose_kernel, narrow_kernel
from cairn.ops.topk.selection import Rows

LAST = 1 << 14
"""Most candidates of a row that one program holds; half of them for FEW rows, which leave most of a
large device to more programs."""
FEW = 8
LEAST_CHUNK = 4096


class Pages(NamedTuple):
    """A page table [Bq, n] int32, the first rows of its requests [Bq + 1] int32, and positions of
    a page."""

    table: Tensor
    bounds: Tensor
    size: int


class _Level(NamedTuple):
    """What a launch reads: scores, positions and counts of the level before, and their sizes."""

    score: Tensor
    places: Tensor | None
    counts: Tensor | None
    width: int
    lines: int


def accepts(rows: Rows) -> bool:
    """Rows that the kernels read."""
    near = rows.score.stride(1) == 1 or rows.score.shape[1] <= 1
    numbers = (rows.lengths, rows.starts)
    return near and all(x is None or x.is_contiguous() for x in numbers)


def select(rows: Rows, pages: Pages | None = None, offset: Tensor | None = None) -> Tensor:
    """[B, topk] int32: `selection.select`, through a page table or moved by an offset [B]."""
    score, lengths, starts, topk = rows
    batch, width = score.shape
    out = torch.empty((batch, topk), dtype=torch.int32, device=score.device)
    if not batch:
        return out
    level = _Level(score, None, None, width, 1)
    last = LAST if batch > FEW else LAST // 2
    chunk = max(LEAST_CHUNK, min(last, gpu.next_power_of_2(8 * topk)))
    while level.width > last:
        level = _narrow(rows, level, chunk)
    table, bounds, size = (None, None, 1) if pages is None else pages
    requests = 0 if table is None else table.shape[0]
    block = gpu.next_power_of_2(max(32, level.width))
    choose_kernel[(batch,)](
        *(level.score, level.places, level.counts, lengths, starts, table, bounds, offset, out),
        *(score.stride(0), level.width, level.lines, topk),
        *(0 if table is None else table.stride(0), requests, size),
        *(block, gpu.next_power_of_2(topk), gpu.next_power_of_2(requests + 1)),
        num_warps=_warps(block),
    )
    return out


def _narrow(rows: Rows, level: _Level, chunk: int) -> _Level:
    score, lengths, starts, topk = rows
    batch, chunks = score.shape[0], -(-level.width // chunk)
    found = _Level(
        score.new_empty((batch, chunks, topk)),
        lengths.new_empty((batch, chunks, topk)),
        lengths.new_empty((batch, chunks)),
        chunks * topk,
        topk,
    )
    narrow_kernel[(batch, chunks)](
        *(level.score, level.places, level.counts, lengths, starts),
        *(found.score, found.places, found.counts),
        *(score.stride(0), level.width, level.lines, topk, chunk),
        num_warps=_warps(chunk),
    )
    return found


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))
