"""select_pages on the CPU in tiles: tokens of one row share a gather of its summaries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu
from cairn.ops.cpu import amx
from cairn.ops.landmark import tile_loops
from cairn.ops.landmark.select_task import Task
from cairn.ops.landmark.tuning import TUNING


def tiles(row: Tensor, candidates: Tensor) -> list[tuple[Tensor, int]]:
    """Batches of tiles of like size: (tokens [U, n], number of pages).

    A tile is up to _TILE tokens of one row; padding entries are T, never the first of a tile. A
    batch pads tokens and pages to at most twice their number. Tokens without candidates are
    omitted.
    """
    total = row.numel()
    alive = (candidates > 0).nonzero()[:, 0]
    if alive.numel() == 0:
        return []
    most = int(candidates.max()) + 1
    key, order = (row[alive] * most + candidates[alive]).sort()
    counts = torch.unique_consecutive(key // most, return_counts=True)[1]
    per_row = (counts + (TUNING.select_cpu_tile - 1)) // TUNING.select_cpu_tile
    owner = torch.repeat_interleave(per_row)
    rank = torch.arange(owner.numel(), device=owner.device) - (per_row.cumsum(0) - per_row)[owner]
    first = (counts.cumsum(0) - counts)[owner] + rank * TUNING.select_cpu_tile
    filled = (counts[owner] - rank * TUNING.select_cpu_tile).clamp(max=TUNING.select_cpu_tile)
    pages = key[first + filled - 1] % most

    size = _bits(filled) * 64 + _bits(pages)
    batches = []
    for one in torch.unique(size).tolist():
        members = (size == one).nonzero()[:, 0]
        width = int(filled[members].max())
        place = torch.arange(width, device=row.device)
        position = (first[members, None] + place).clamp(max=order.numel() - 1)
        tokens = torch.where(place < filled[members, None], alive[order[position]], total)
        # Tiles per batch by pages per tile: about the same number of summaries in each batch.
        step = max(1, 2048 // int(pages[members].max()))
        for part, some in zip(tokens.split(step), members.split(step), strict=True):
            batches.append((part, int(pages[some].max())))
    return batches


def _bits(number: Tensor) -> Tensor:
    """ceil(log2(number)) for number >= 1."""
    return torch.frexp((number - 1).double()).exponent.long()


def gather(table: Tensor, physical: Tensor | slice) -> Tensor:
    """table[physical]; whole rows are copied where the layout allows it, which that of a slice does
    not."""
    if isinstance(physical, slice) or not table.is_contiguous():
        return table[physical]
    lines = table.view(table.shape[0], -1).index_select(0, physical.reshape(-1))
    return lines.view(*physical.shape, *table.shape[1:])


class Scorer:
    """Computes u = scale * z . R + b for tiles of tokens and the pages of each.

    Args:
        task: the strategy's parameters.
        lmk_q: z [T, h_q, d].
        summaries: R [U, P, h_R, d]; bias: b [U, P, h_q] float32, or None.
    """

    def __init__(self, task: Task, lmk_q: Tensor, summaries: Tensor, bias: Tensor | None) -> None:
        self._task, self._lmk_q = task, lmk_q
        self._bias = None if bias is None else bias.transpose(1, 2)
        self._tiled = _by_tiles(task, lmk_q, summaries)
        if self._tiled:
            units, pages, heads, dim = summaries.shape
            # The products take blocks of sixteen queries and 64 keys.
            keys = summaries.new_zeros(units, heads, -(-pages // 64) * 64, dim)
            keys[:, :, :pages] = summaries.transpose(1, 2)
            self._keys, self._columns = keys, pages
        else:
            self._keys = task.keys(summaries).transpose(1, 2)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[U, h, c, P] float32 of tokens [U, c]."""
        task, bias = self._task, self._bias
        if self._tiled:
            shape = (len(tokens), task.score_heads, tokens.shape[1], self._columns)
            u = self._keys.new_empty(shape, dtype=torch.float32)
            tile_loops.score_pages(
                cpu.as_array(self._lmk_q.contiguous().view(torch.float32)),
                *map(cpu.as_array, (tokens.contiguous(), self._keys)),
                cpu.array_or_empty(None if bias is None else bias.contiguous(), u.dtype, 3),
                np.float32(task.scale),
                amx.shapes(),
                cpu.as_array(u),
            )
            return u
        queries = task.queries(self._lmk_q[tokens])
        if bias is not None and task.key_heads == task.score_heads:
            u = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), queries, self._keys)
        else:
            u = torch.bmm(queries, self._keys)
        u = u.view(len(tokens), task.score_heads, -1, self._keys.shape[-1])
        if bias is not None and task.key_heads < task.score_heads:
            u += bias.unsqueeze(2)
        return u


def _by_tiles(task: Task, lmk_q: Tensor, summaries: Tensor) -> bool:
    """Whether the AMX loop applies."""
    return (
        amx.AVAILABLE
        and lmk_q.dtype == summaries.dtype == torch.bfloat16
        and task.key_heads == summaries.shape[2]
        and not task.summed
        and 16 % (task.score_heads // task.key_heads) == 0
        and lmk_q.shape[2] % 32 == 0
    )
