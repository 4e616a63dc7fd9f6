"""The slots of a step in which rows decode one token each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache.kernels import decode_slots_kernel
from cairn.ops.call import Call
from cairn.ops.checks import INT32, INT64, check_min, expect, refuse
from cairn.ops.pdl import pdl_option
from cairn.ops.registry import op

LINES = 9
MOST = 2048
"""Slots that one program lays out."""


@op(mutates=("tables",))
def decode_slots(
    row: Tensor,
    first: Tensor,
    cells: Tensor,
    pages: Tensor,
    last_token: Tensor,
    tables: Tensor,
    windowed: bool,
    page_size: int,
    landmark_id: int | None,
    spare: int,
    window_spare: int,
    given: Tensor | None = None,
) -> Tensor:
    """Write the newly allocated pages into the page tables; then compute the slots of the next
    token of each row (or of several, with drafts), with a landmark slot after a token that fills a
    page.

    Args:
        row: [T] int64, the rows, then R for padding. T is at least the number of slots.
        first: [T] int64, user tokens of each row that have run.
        cells: [T] int64, flat indices of the table cells that change. A repeated cell must get the
            same page.
        pages: [T] int32, the pages written to them.
        last_token: [R + 1] int64, the token that each row runs; below 0 there was none to choose,
            and the row runs 0.
        tables: [rows, max_pages] int32, changed: the physical page of each logical page. First of
            the R rows, then with `windowed` of these again, of layers with pages of their own; more
            rows are nobody's.
        windowed: whether there are such layers.
        page_size: S.
        landmark_id: token id of landmarks; None: there are none, and slots are tokens.
        spare, window_spare: location of padding in either pool.
        given: [T] int64 or None. Entries of one row follow each other, `first` one further each:
            n >= 0 runs n, a guess; -1 the row's last token; n < -1 token -2 - n. None: all are -1.
    Returns:
        [9, T] int64, the slots in the order of the rows: token ids (padding: 0), rotary positions
        (0), rows (0), slots (-1), locations page * S + slot % S (`spare`); indices of the slots
        that end their page (0) and the physical pages that these complete (-1), as many as there
        are; locations in the other pool (`window_spare`); and where each row's token lies (0).
    Raises:
        BadArgument: for another shape, dtype, device, layout or page size.
    """
    most, num_rows = row.shape[0], last_token.shape[0] - 1
    tables.view(-1).index_copy_(0, cells, pages)
    landmarks = landmark_id is not None
    live = row < num_rows
    slot = first + first // (page_size - 1) if landmarks else first
    logical = slot // page_size
    place = slot - logical * page_size
    fills = live & (place == page_size - 1 - landmarks)
    count = live.long() + (fills.long() if landmarks else 0)
    start = count.cumsum(0) - count
    known = row.clamp(max=num_rows - 1)
    held = [tables[known + n * num_rows, logical].long() for n in range(1 + windowed)]
    locations = [page * page_size + place for page in held]
    if not windowed:
        locations.append(torch.full_like(row, window_spare))
    # One column more than there are tokens: padding is scattered there.
    out = row.new_zeros(LINES, most + 1)
    for line, padding in ((3, -1), (4, spare), (6, -1), (7, window_spare)):
        out[line] = padding
    position = slot - logical if landmarks else slot
    token = last_token[row].clamp(min=0)
    if given is not None:
        token = torch.where(given == -1, token, torch.maximum(given, -2 - given))
    own = (token, position, row, slot, *locations)
    _scatter(out, torch.where(live, start, most), own)
    if landmark_id is not None:
        behind, more = torch.where(fills, start + 1, most), 1 if windowed else 0
        own = (torch.full_like(row, landmark_id), position + 1, row, slot + 1)
        _scatter(out, behind, (*own, locations[0] + 1, locations[1] + more))
    ends = torch.where(fills, fills.long().cumsum(0) - 1, most)
    out[5].scatter_(0, ends, start + landmarks)
    out[6].scatter_(0, ends, held[0])
    out[8, :most] = torch.where(live, start, 0)
    return out[:, :most].contiguous()


def _scatter(out: Tensor, at: Tensor, values: Sequence[Tensor]) -> None:
    """Ids, positions, rows, slots and locations of slots `at`."""
    for line, value in zip((0, 1, 2, 3, 4, 7), values, strict=True):
        out[line].scatter_(0, at, value)


@decode_slots.check
def _(call: Call) -> None:
    name = "decode_slots"
    expect(name, "row", call.row, 1, INT64)
    expect(name, "first", call.first, call.row.shape, INT64, call.row)
    expect(name, "cells", call.cells, call.row.shape, INT64, call.row)
    expect(name, "pages", call.pages, call.row.shape, INT32, call.row)
    expect(name, "last_token", call.last_token, 1, INT64, call.row)
    expect(name, "tables", call.tables, 2, INT32, call.row, dense=-1)
    if call.given is not None:
        expect(name, "given", call.given, call.row.shape, INT64, call.row)
    num_rows = call.last_token.shape[0] - 1
    if num_rows < 1:
        refuse(name, "last_token", f"has {num_rows + 1} numbers, not one for a row and one behind")
    needed = num_rows * (1 + call.windowed)
    if call.tables.shape[0] < needed:
        refuse(name, "tables", f"has {call.tables.shape[0]} rows, not {needed} or more")
    check_min(name, "page_size", call.page_size, 1 if call.landmark_id is None else 2)


@decode_slots.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.row.shape[0] <= MOST
        and all(
            t.stride(0) == 1
            for t in (call.row, call.first, call.cells, call.pages, call.last_token, call.given)
            if t is not None
        )
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    most = call.row.shape[0]
    out = gpu.empty((LINES, most), call.row.dtype, call.row.device)
    if most == 0:
        return out
    per_page = call.page_size if call.landmark_id is None else call.page_size - 1
    pdl = gpu.supports_pdl(call.row.device)
    decode_slots_kernel[(1,)](
        row_ptr=call.row,
        first_ptr=call.first,
        cells_ptr=call.cells,
        pages_ptr=call.pages,
        last_token_ptr=call.last_token,
        tables_ptr=call.tables,
        given_ptr=call.given,
        out_ptr=out,
        num_rows=call.last_token.shape[0] - 1,
        most=most,
        width=call.tables.shape[1],
        spare=call.spare,
        window_spare=call.window_spare,
        landmark_id=call.landmark_id or 0,
        SIZE=call.page_size,
        PER_PAGE=per_page,
        WINDOWED=call.windowed,
        BLOCK=gpu.next_power_of_2(most),
        PDL=pdl,
        num_warps=gpu.warps_for(2 * most),
        **pdl_option(pdl),
    )
    return out
