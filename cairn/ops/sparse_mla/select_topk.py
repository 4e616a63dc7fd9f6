"""Selection of the keys for sparse attention (DeepSeek-V3.2 report, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, check_rows, expect, expect_within, refuse
from cairn.ops.registry import op
from cairn.ops.top_k import launch, selection
from cairn.ops.top_k.selection import NONE, Rows


@op
def select_topk(
    logits: Tensor,
    count: Tensor,
    topk: int,
    start: Tensor | None = None,
    page_table: Tensor | None = None,
    row: Tensor | None = None,
    page_size: int = 0,
) -> Tensor:
    """Positions of the topk largest logits of every token, exact for any logits.

    A token has the candidates logits[t, start : start + count]. With count <= topk all are
    selected, whatever the logits. Of equal logits (+0 equals -0) the lower position is selected;
    NaN counts as -inf. With a page table each position p is replaced by its cell, page_table[row, p
    // S] * S + p % S, S = page_size.

    Args:
        logits: [T, L] float32, rows of any stride.
        count: [T] int32 or int64.
        topk: 1 to 4096.
        start: [T] int32 or int64; None: 0.
        page_table: [rows, max_pages] int32.
        row: [T] int64, of the page table.
        page_size: S.
    Returns:
        [T, topk] int32, positions relative to start or their cells, in the order of ascending
        positions, padded with -1.
    Raises:
        BadArgument: for another shape, dtype or device, or only some of the page table's arguments.
    """
    position = _in_blocks(selection.select, logits, count, topk, start)
    return _cells(position, page_table, row, page_size)


def _in_blocks(
    select: Callable[[Rows], Tensor],
    logits: Tensor,
    count: Tensor,
    topk: int,
    start: Tensor | None,
) -> Tensor:
    """`select` in blocks of tokens, because it allocates several tensors of the logits' shape."""
    position = selection.blank(logits, topk)
    counts, starts = count.int(), None if start is None else start.int()
    block = paging.tokens_per_block(32 * logits.shape[1], len(logits))
    for first in range(0, len(logits), block):
        part = slice(first, first + block)
        begin = None if starts is None else starts[part]
        position[part] = select(Rows(logits[part], counts[part], begin, topk))
    return position


def _cells(
    position: Tensor, page_table: Tensor | None, row: Tensor | None, page_size: int
) -> Tensor:
    """Positions [T, topk], or with a page table their cells; positions beyond the table become
    -1."""
    if page_table is None or row is None:
        return position
    columns = page_table.shape[1]
    if not columns:
        return torch.full_like(position, NONE)
    column = position.long() // page_size
    page = page_table[row.unsqueeze(1), column.clamp(0, columns - 1)]
    cell = page * page_size + position % page_size
    return torch.where((position >= 0) & (column < columns), cell, NONE)


@select_topk.fake
def _(call: Call) -> Tensor:
    return selection.blank(call.logits, call.topk)


@select_topk.check
def _(call: Call) -> None:
    name = "select_topk"
    expect(name, "logits", call.logits, 2, (torch.float32,))
    tokens = len(call.logits)
    expect(name, "count", call.count, (tokens,), INDICES, call.logits)
    if not 1 <= call.topk <= selection.MOST:
        refuse(name, "topk", f"is {call.topk}, not 1 to {selection.MOST}")
    if call.start is not None:
        expect(name, "start", call.start, (tokens,), INDICES, call.logits)
    if call.page_table is None:
        if call.row is not None or call.page_size:
            refuse(name, "page_table", "is None, but `row` or `page_size` is given")
        return
    check_rows(name, tokens, call.row, call.page_table, call.logits)
    expect_within(name, "row", call.row, len(call.page_table))
    if call.page_size < 1:
        refuse(name, "page_size", f"is {call.page_size}, not 1 or more")


def _lines(call: Call) -> bool:
    table, row = call.page_table, call.row
    near = table is None or (table.stride(1) == 1 and row.is_contiguous())
    return near and launch.accepts(Rows(call.logits, call.count, call.start, call.topk))


@select_topk.implementation("topk", devices=("cpu",))
def _(call: Call) -> Tensor:
    position = _in_blocks(selection.select_by_topk, call.logits, call.count, call.topk, call.start)
    return _cells(position, call.page_table, call.row, call.page_size)


@select_topk.implementation("triton", devices=gpu.DEVICES, when=_lines, replayed=True)
def _(call: Call) -> Tensor:
    pages = None
    if call.page_table is not None:
        pages = launch.Pages(call.page_table, None, call.page_size, call.row)
    starts = None if call.start is None else call.start.int()
    return launch.select(Rows(call.logits, call.count.int(), starts, call.topk), pages)
