"""Latent attention over a range of slots of a row, through the page table."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import (
    FLOAT32,
    INDICES,
    check_dtype,
    check_rows,
    expect,
    expect_within,
    refuse,
)
from cairn.ops.registry import op
from cairn.ops.sparse_mla import attend_launch
from cairn.ops.sparse_mla.sparse_mla import check_records, sparse_mla

NAME = "paged_mla"


@op
def paged_mla(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    end: Tensor,
    scale: float,
    value_dim: int,
    begin: Tensor | None = None,
    sink: Tensor | None = None,
    dtype: torch.dtype | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla` over slots begin .. end - 1 of each token's row.

    Args:
        q, cache, scale, value_dim, sink, dtype: as in `sparse_mla`.
        page_table: [rows, max_pages] int32; page ids out of range are skipped.
        row: [T] int64, of the page table.
        begin, end: [T] int32 or int64; begin None: 0. A token with end <= begin attends to nothing.
        width: upper bound of `end`; None: slots of the page table.
    Returns:
        (o [T, H, r], lse [T, H] float32, without the sink).
    Raises:
        BadArgument: for another shape, dtype, device or layout, or (on a CPU) a row or end beyond
            the page table.
    """
    size, pages = cache.shape[1], cache.shape[0]
    columns = page_table.shape[1] if width is None else -(-width // size)
    slot = torch.arange(columns * size, dtype=torch.int32, device=q.device)
    if width is not None:
        slot = slot[:width]
    parts = []
    block = paging.tokens_per_block(16 * max(1, len(slot)), len(q))
    for first in range(0, max(1, len(q)), block):
        part = slice(first, first + block)
        page = page_table[row[part]][:, slot // size]
        cells = page * size + slot % size
        absent = (page < 0) | (page >= pages) | (slot >= end[part].unsqueeze(1))
        if begin is not None:
            absent |= slot < begin[part].unsqueeze(1)
        cells.masked_fill_(absent, -1)
        length = torch.full_like(end[part], len(slot))
        given = (q[part], cache, cells, length, scale, value_dim, sink, dtype)
        parts.append(sparse_mla.reference(*given))
    o, lse = (torch.cat(found) for found in zip(*parts, strict=True))
    return o, lse


@paged_mla.check
def _(call: Call) -> None:
    tokens, heads, size = check_records(NAME, call.q, call.cache, call.value_dim)
    check_rows(NAME, tokens, call.row, call.page_table, call.q)
    expect(NAME, "end", call.end, (tokens,), INDICES, call.q)
    if call.begin is not None:
        expect(NAME, "begin", call.begin, (tokens,), INDICES, call.q)
    if call.sink is not None:
        expect(NAME, "sink", call.sink, (heads,), FLOAT32, call.q)
    check_dtype(NAME, call.dtype)
    reach = call.page_table.shape[1] * size
    if call.width is not None and not 0 <= call.width <= reach:
        refuse(NAME, "width", f"is {call.width}, not 0 to the {reach} slots of the page table")
    expect_within(NAME, "row", call.row, len(call.page_table))
    most = reach if call.width is None else call.width
    expect_within(NAME, "end", call.end, most + 1, begin=None)


def _fits(call: Call) -> bool:
    ends = (call.end, *(() if call.begin is None else (call.begin,)))
    near = call.page_table.stride(1) == 1 and all(x.is_contiguous() for x in ends)
    return near and attend_launch.accepts(call.q, call.cache, call.value_dim)


@paged_mla.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> tuple[Tensor, Tensor]:
    reach = call.page_table.shape[1] * call.cache.shape[1]
    candidates = attend_launch.Candidates(
        call.end,
        reach if call.width is None else call.width,
        table=call.page_table,
        row=call.row,
        begin=call.begin,
    )
    o, lse, _ = attend_launch.attend(
        call.q,
        call.cache,
        candidates,
        call.scale,
        call.value_dim,
        call.sink,
        call.dtype or torch.float32,
    )
    return o, lse


paged_mla.tolerance(sparse_mla.tolerances, sparse_mla.tolerance_reason)
