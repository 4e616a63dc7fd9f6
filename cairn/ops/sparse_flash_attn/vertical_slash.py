"""From vertical lines and diagonals of an attention map to the blocks and columns that hold them
(MInference, Jiang et al. 2024, section 3.2, where kernels read such tables).

Queries come in row blocks of M. In the row block from `start` to e = start + M, with D = kv - q
(causal) or kv, the diagonal of slash s touches the keys [x - M, x), x = max(D + e - s, M): a band.
Slashes descend, so bands ascend. A band opens a range of keys; the next joins it, and makes it M
keys longer, unless it ends more than M keys beyond. Ranges are read in blocks of N keys from their
start, and the verticals that lie in none of them one by one, as columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.checks import expect, refuse


class Lines(NamedTuple):
    """The arguments of a conversion.

    Attributes:
        q_seqlens, kv_seqlens: [B] int32.
        verticals: [B, H, NV] int32, ascending.
        slashes: [B, H, NS] int32, descending.
        vertical_counts, slash_counts: [H] int32, how many of each are used; None: all.
        context_size, block_m, block_n, causal: as in the ops.
    """

    q_seqlens: Tensor
    kv_seqlens: Tensor
    verticals: Tensor
    slashes: Tensor
    vertical_counts: Tensor | None
    slash_counts: Tensor | None
    context_size: int
    block_m: int
    block_n: int
    causal: bool

    @property
    def row_blocks(self) -> int:
        """R = ceil(context / M)."""
        return -(-self.context_size // self.block_m)

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Block counts, block offsets, column counts and column indices, all zero."""
        shape = (*self.slashes.shape[:2], self.row_blocks)

        def blank(shape: tuple[int, ...]) -> Tensor:
            return gpu.zeros(shape, torch.int32, self.slashes.device)

        blocks, columns = self.slashes.shape[2], self.verticals.shape[2]
        return blank(shape), blank((*shape, blocks)), blank(shape), blank((*shape, columns))


def check(name: str, lines: Lines, merged: bool = False) -> None:
    """Raise BadArgument unless the op of this name takes these lines; merged: with counts."""
    word, q = (torch.int32,), lines.q_seqlens
    expect(name, "q_seqlens", q, (None,), word, dense=-1)
    batch = q.shape[0]
    expect(name, "kv_seqlens", lines.kv_seqlens, (batch,), word, q, dense=-1)
    expect(name, "vertical_indexes", lines.verticals, (batch, None, None), word, q, dense=-1)
    heads = lines.verticals.shape[1]
    expect(name, "slash_indexes", lines.slashes, (batch, heads, None), word, q, dense=-1)
    if not lines.slashes.shape[-1]:
        refuse(name, "slash_indexes", "has no entries: every list needs slash 0")
    for argument, counts in (
        ("vertical_indices_count", lines.vertical_counts),
        ("slash_indices_count", lines.slash_counts),
    ):
        if merged:
            expect(name, argument, counts, (heads,), word, q, dense=-1)
    if lines.context_size < 0:
        refuse(name, "context_size", f"is {lines.context_size}")
    if lines.block_m < 1:
        refuse(name, "block_size_M", f"is {lines.block_m}")
    if lines.block_n < lines.block_m:
        # Then one slash could cover more than one block, and the table has one place per slash.
        refuse(name, "block_size_N", f"is {lines.block_n}, less than block_size_M {lines.block_m}")


def convert(lines: Lines) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tables of the ops."""
    block_count, block_offset, column_count, column_index = found = lines.tables()
    if not block_count.numel():
        return found
    q, kv = (x.long().view(-1, 1, 1, 1) for x in (lines.q_seqlens, lines.kv_seqlens))
    start = torch.arange(lines.row_blocks, device=q.device).unsqueeze(1) * lines.block_m
    alive = start < q
    lows, highs, blocks, added = _ranges(lines, start, q, kv)
    _list(block_count, block_offset, blocks, added & alive)
    verticals = lines.verticals.long().unsqueeze(2)
    wide = verticals.expand(*block_count.shape, -1).contiguous()
    # The first range that ends after a vertical contains it or begins after it.
    holder = torch.searchsorted(highs, wide, right=True)
    none = holder == highs.shape[-1]
    left = wide < lows.gather(-1, holder.clamp(max=highs.shape[-1] - 1))
    column = torch.where(none, (wide < kv) & (not lines.causal), left)
    number = torch.arange(wide.shape[-1], device=q.device)
    column &= number < _used(lines.vertical_counts, wide)
    _list(column_count, column_index, wide, column & alive)
    return found


def _used(counts: Tensor | None, all_of: Tensor) -> Tensor | int:
    """How many of a list are used, by head."""
    return all_of.shape[-1] if counts is None else counts.long().view(1, -1, 1, 1)


def _list(count: Tensor, table: Tensor, values: Tensor, taken: Tensor) -> None:
    """Write the selected values contiguously, and their count."""
    place = torch.where(taken, taken.cumsum(-1) - 1, table.shape[-1])
    # An extra place takes the values that are not listed.
    wider = torch.nn.functional.pad(table, (0, 1)).scatter_(-1, place, values.to(table.dtype))
    table.copy_(wider[..., :-1])
    count.copy_(taken.sum(-1))


def _ranges(
    lines: Lines, start: Tensor, q: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """After every slash: the open range [low, high), the start of the block that the slash adds,
    and whether it adds one; [B, H, R, NS] each.

    With M <= N a slash adds one block at most.
    """
    m, n = lines.block_m, lines.block_n
    end = start + m + (kv - q if lines.causal else kv)
    slash = lines.slashes.long().unsqueeze(2)
    number = torch.arange(slash.shape[-1], device=slash.device)
    used = _used(lines.slash_counts, slash)
    listed = number < used
    last = torch.clamp(torch.as_tensor(used, device=slash.device) - 1, min=0)
    first = torch.minimum((listed & (slash >= end)).sum(-1, keepdim=True), last)
    own = slash.expand(*first.shape[:-1], -1).gather(-1, first)
    # Where every diagonal lies beyond the keys, a range behind them leaves all verticals columns.
    bare = (own > end) | (torch.as_tensor(used, device=slash.device) == 0)
    behind = end if lines.causal else kv.expand_as(end)
    x = (end - slash).clamp(min=m)
    opening = number == first
    follows = listed & (number > first) & (lines.causal | (slash >= start))
    begin = torch.where(opening & bare, behind, x - m)
    stop = torch.where(opening & bare, behind + n, x)
    low = high = follow = torch.full_like(first, -1)
    steps: list[tuple[Tensor, ...]] = []
    for j in range(slash.shape[-1]):
        at = slice(j, j + 1)
        opens = opening[..., at] | (follows[..., at] & (x[..., at] > high + m))
        grows = follows[..., at] & ~opens & (x[..., at] > high)
        low = torch.where(opens, begin[..., at], low)
        high = torch.where(opens, stop[..., at], torch.where(grows, high + m, high))
        follow = torch.where(opens, low, follow)
        adds = (opens | grows) & (follow < torch.minimum(high, kv))
        steps.append((low, high, follow, adds))
        follow = torch.where(adds, follow + n, follow)
    lows, highs, blocks, added = (torch.cat(parts, -1) for parts in zip(*steps, strict=True))
    return lows, highs, blocks, added
