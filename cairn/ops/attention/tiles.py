"""Prefill on the CPU: tokens of one row in one aligned block of slots share their keys.

torch's flash kernel for the CPU takes a tile of queries (the query heads of a KV head side by side)
with the keys they share; it keeps float32 logits and never stores the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.ops.cpu import amx

FEW_TOKENS = 32
"""Steps with fewer tokens share too few keys for tiles."""
_PER_ROW = 2
"""Larger steps with at most this mean number of tokens per row (a token and a landmark) count as
decode steps."""


@dataclass(frozen=True)
class Tiles:
    """Blocks of slots in which enough tokens of the step lie.

    Attributes:
        grid: [n, size] int64, the token in each slot of the block, or T (the number of tokens).
        row: [n] int64.
        start: [n] int64, first slot of the block, a multiple of `size`.
        last: [n] int64, last slot that holds a token of the step.
    """

    grid: Tensor
    row: Tensor
    start: Tensor
    last: Tensor

    def take(self, which: Tensor | slice) -> Tiles:
        """The tiles chosen by an index."""
        return Tiles(self.grid[which], self.row[which], self.start[which], self.last[which])


def tile_size(page_size: int, group: int, tokens: int, rows: int) -> int:
    """Slots of a tile: whole pages, so that about `rows` queries (with their heads) share keys."""
    return page_size * max(1, min(rows // group, 256, tokens) // page_size)


def cut(row: Tensor, slot: Tensor, size: int) -> tuple[Tiles, Tensor] | None:
    """Cut a step into tiles.

    Args:
        row, slot: [T] int64 in any order, T > 0.
        size: slots of a tile.
    Returns:
        The tiles that are at least a quarter full, and the tokens [m] of all others; None if a
        slot occurs twice.
    """
    tokens = row.numel()
    block = slot // size
    blocks = int(block.max()) + 1
    key, tile, counts = torch.unique(row * blocks + block, return_inverse=True, return_counts=True)
    grid = row.new_full((key.numel(), size), tokens)
    grid[tile, slot % size] = torch.arange(tokens, device=row.device)
    if int((grid < tokens).sum()) != tokens:
        return None
    start = (key % blocks) * size
    last = start + torch.where(grid < tokens, torch.arange(size, device=row.device), 0).amax(dim=1)
    tiles = Tiles(grid, key // blocks, start, last)
    short = counts * 4 < size
    if not bool(short.any()):
        return tiles, row.new_empty(0)
    return tiles.take((~short).nonzero()[:, 0]), short[tile].nonzero()[:, 0]


def worthwhile(q: Tensor, k_cache: Tensor, row: Tensor) -> bool:
    """Whether a step may hold tiles at all: not a decode step, plain memory."""
    return (
        q.shape[0] >= 32
        and k_cache.shape[2] > 1
        and row.numel() > 0
        and k_cache.is_contiguous()
        and q.dtype == k_cache.dtype
    )


def few(row: Tensor) -> bool:
    """Whether a step has few tokens, or few tokens per row. The [T] tokens of each row are
    adjacent; T > 0."""
    tokens = row.numel()
    if tokens < FEW_TOKENS:
        return tokens > 0
    rows = row.numpy()
    return bool(_PER_ROW * (1 + np.count_nonzero(rows[1:] != rows[:-1])) >= tokens)


def few_in_loops(q: Tensor, k_cache: Tensor, v_cache: Tensor, row: Tensor) -> bool:
    """Whether loops take a step: few tokens, plain memory."""
    plain = k_cache.is_contiguous() and v_cache.is_contiguous()
    return plain and q.dtype == k_cache.dtype and few(row)


def amx_takes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float | None, *others: Tensor
) -> bool:
    """Whether loops with AMX take a step's queries, caches, and what says where they lie."""
    heads, size, dim = k_cache.shape[1:]
    return (
        amx.AVAILABLE
        and q.shape[0] > 0
        # The loops take the maximum before scaling, which is right for positive scales only.
        and (scale is None or scale > 0)
        and q.dtype == k_cache.dtype == torch.bfloat16
        and size % 64 == 0
        and dim % 64 == 0
        and q.shape[1] <= 16 * heads
        and all(x.is_contiguous() for x in (k_cache, v_cache, *others))
    )


def blocks(row: Tensor, slot: Tensor, size: int) -> NDArray[np.int64]:
    """[n + 1]: the tokens that blocks begin with, T last; a block's tokens lie in neighbouring
    slots of a row, `size` at most."""
    rows, slots, tokens = row.numpy(), slot.numpy(), np.arange(len(row))
    new = np.ones(len(row), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (slots[1:] != slots[:-1] + 1)
    within = tokens - np.maximum.accumulate(np.where(new, tokens, 0))
    return np.append(np.flatnonzero(within % size == 0), len(row))


def cells(grid: Tensor, heads: int) -> Tensor:
    """Index of every (tile, KV head, slot) into tokens seen as [T * h_kv]: [n, h_kv, size]."""
    return grid.unsqueeze(1) * heads + torch.arange(heads, device=grid.device).unsqueeze(1)


def queries(q: Tensor, index: Tensor, heads: int) -> Tensor:
    """Gather the queries of `cells`: [n * h_kv, 1, size * G, d]; empty cells hold any query."""
    tokens, _, dim = q.shape
    lines = q.reshape(tokens * heads, -1)
    taken = lines.index_select(0, index.reshape(-1).clamp(max=tokens * heads - 1))
    return taken.view(index.shape[0] * heads, 1, -1, dim)


def flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, Q, d] over k, v [N, H, L, d].

    Args:
        mask: None, or added to the logits: [N or 1, H or 1, Q or 1, L], float32 or q's dtype.
        scale: None: d ** -0.5.
    Returns:
        (o [N, H, Q, d] in q's dtype, lse [N, H, Q] float32). A query that sees no key gets zeros.
    """
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
    return o, lse


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of -inf where hidden and 0 elsewhere."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)
