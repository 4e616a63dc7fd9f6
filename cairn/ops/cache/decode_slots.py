"""The slots of a step in which rows decode one token each."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.cache.kernels import decode_slots_kernel
from cairn.ops.checks import INT32, INT64, check_least, expect
from cairn.ops.registry import op
from cairn.ops.testing import Arguments, Cases, Make

LINES = 9
MOST = 2048
"""Slots that one program lays out."""


@op
def decode_slots(
    row: Tensor,
    first: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    window_table: Tensor | None,
    page_size: int,
    landmark_id: int | None,
    spare: int,
    window_spare: int,
) -> Tensor:
    """Lay out the next token of each row, with the landmark that follows where it fills a page.

    Args:
        row: [T] int64, the rows; R for those that are none, behind all others. T is at least the
            number of slots.
        first: [T] int64, user tokens of each row that have run.
        last_token: [R + 1] int64, the token that each row runs; below 0 there was none to choose,
            and the row runs 0.
        page_table: [R, max_pages] int32, physical page of each logical page.
        window_table: the same of layers with pages of their own; None: there are none.
        page_size: S.
        landmark_id: token id of landmarks; None: there are none, and slots are tokens.
        spare, window_spare: location of padding in either pool.
    Returns:
        [9, T] int64, the slots in the order of the rows: token ids (padding: 0), rotary positions
        (0), rows (0), slots (-1), locations page * S + slot % S (`spare`); indices of the slots
        that end their page (0) and the physical pages that these complete (-1), as many as there
        are; locations in the other pool (`window_spare`); and where each row's token lies (0).
    Raises:
        BadArgument: for another shape, dtype, device, layout or page size.
    """
    most, (num_rows, _) = row.shape[0], page_table.shape
    landmarks = landmark_id is not None
    live = row < num_rows
    slot = first + first // (page_size - 1) if landmarks else first
    logical = slot // page_size
    place = slot - logical * page_size
    fills = live & (place == page_size - 1 - landmarks)
    count = live.long() + (fills.long() if landmarks else 0)
    start = count.cumsum(0) - count
    known = row.clamp(max=num_rows - 1)
    pages = [t[known, logical].long() for t in (page_table, window_table) if t is not None]
    locations = [page * page_size + place for page in pages]
    if window_table is None:
        locations.append(torch.full_like(row, window_spare))
    # What is for nobody goes to a column behind the last.
    out = row.new_zeros(LINES, most + 1)
    for line, padding in ((3, -1), (4, spare), (6, -1), (7, window_spare)):
        out[line] = padding
    tokens = torch.where(live, start, most)
    position = slot - logical if landmarks else slot
    for line, values in (
        *((0, last_token[row].clamp(min=0)), (1, position), (2, row), (3, slot)),
        *((4, locations[0]), (7, locations[1])),
    ):
        out[line].scatter_(0, tokens, values)
    if landmark_id is not None:
        behind = torch.where(fills, start + 1, most)
        more = 0 if window_table is None else 1
        for line, values in (
            *((0, torch.full_like(row, landmark_id)), (1, position + 1), (2, row), (3, slot + 1)),
            *((4, locations[0] + 1), (7, locations[1] + more)),
        ):
            out[line].scatter_(0, behind, values)
    ends = torch.where(fills, fills.long().cumsum(0) - 1, most)
    out[5].scatter_(0, ends, start + landmarks)
    out[6].scatter_(0, ends, pages[0])
    out[8, :most] = torch.where(live, start, 0)
    return out[:, :most].contiguous()


@decode_slots.check
def _(
    row: Tensor,
    first: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    window_table: Tensor | None,
    page_size: int,
    landmark_id: int | None,
    spare: int,
    window_spare: int,
) -> None:
    name = "decode_slots"
    expect(name, "row", row, 1, INT64)
    expect(name, "first", first, row.shape, INT64, row)
    expect(name, "page_table", page_table, 2, INT32, row, 1)
    expect(name, "last_token", last_token, (page_table.shape[0] + 1,), INT64, row)
    if window_table is not None:
        expect(name, "window_table", window_table, page_table.shape, INT32, row, 1)
    check_least(name, "page_size", page_size, 1 if landmark_id is None else 2)


@decode_slots.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda row, first, last_token, *args, **kwargs: (
        row.shape[0] <= MOST and row.stride(0) == first.stride(0) == last_token.stride(0) == 1
    ),
)
def _(
    row: Tensor,
    first: Tensor,
    last_token: Tensor,
    page_table: Tensor,
    window_table: Tensor | None,
    page_size: int,
    landmark_id: int | None,
    spare: int,
    window_spare: int,
) -> Tensor:
    most = row.shape[0]
    out = row.new_empty(LINES, most)
    if most == 0:
        return out
    other = page_table if window_table is None else window_table
    per_page = page_size if landmark_id is None else page_size - 1
    decode_slots_kernel[(1,)](
        *(row, first, last_token, page_table, other, out, page_table.shape[0], most),
        *(page_table.stride(0), other.stride(0), spare, window_spare, landmark_id or 0),
        *(page_size, per_page, window_table is not None, gpu.next_power_of_2(most)),
        num_warps=gpu.warps_for(2 * most),
    )
    return out


def _arguments(make: Make, num_rows: int, size: int, count: int, most: int) -> Arguments:
    """`count` of the rows decode; some of them fill their page."""
    max_pages = 9
    row = make.randint(0, 1, most) + num_rows
    row[:count] = make.rand(num_rows).argsort()[:count].sort().values
    first = make.randint(0, 1, most)
    first[:count] = make.randint(0, (size - 1) * max_pages, count)
    some = -(-count // 3)
    first[:some] = first[:some] // (size - 1) * (size - 1) + size - 2
    table = make.randint(0, 99, 2 * num_rows, max_pages, dtype=torch.int32)
    last_token = make.randint(0, 500, num_rows + 1)
    last_token[row[0]] = -1
    return make.args(
        *(row, first, last_token, table[:num_rows], table[num_rows:]),
        *(size, 500, 99 * size + 1, 99 * size + 2),
    )


@decode_slots.cases
def _(make: Make) -> Cases:
    for sizes in ((1, 4, 1, 2), (5, 4, 3, 16), (40, 16, 40, 80), (64, 64, 50, 128), (9, 2, 9, 18)):
        given = _arguments(make, *sizes)
        yield given
        for window_table, landmark_id in ((None, 500), (given.args[4], None), (None, None)):
            args = list(given.clone().args)
            args[4], args[6] = window_table, landmark_id
            yield make.args(*args)
    yield _arguments(make, 3, 4, 0, 16)


@decode_slots.bench
def _(draw: Draw) -> Points:
    for rows in (1, 8, 64):
        given = _arguments(draw, rows, 64, rows, 2 * rows)
        least = LINES * moved(given.args[0])
        yield Point(str(rows), given, least, alternatives=draw.by_torch(decode_slots.reference))
