"""Kernel that selects the top-k positions of a row from the candidate lists of
`cairn.ops.select_k`."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous
from cairn.ops.select_k.kernels import (
    best_of,
    candidates_of,
    load_listed,
    load_scores,
    ordered,
    take_lists,
)


@triton.jit
def request_of(bounds, row, requests, BP: tl.constexpr):
    """The request q with bounds[q] <= row < bounds[q + 1]; -1 if there is none."""
    at = tl.arange(0, BP)
    begin = tl.load(bounds + at, mask=at <= requests, other=2147483647)
    request = tl.sum((begin <= row).to(tl.int32), 0) - 1
    return tl.where(request < requests, request, -1)


@triton.jit
def cell_of(
    place, inside, row, table, bounds, owners, offset, table_stride, columns, requests, page_size,
    BP: tl.constexpr,
):  # fmt: skip
    """The outputs for positions place [N] of a row: slots of the page table, or positions plus an
    offset; see the ops.

    Args:
        bounds: cu_seqlens of the rows of scores of each row of the table; or
        owners: the table row of each row of scores.
    """
    cell = place
    if table is not None:
        if owners is None:
            request = request_of(bounds, row, requests, BP)
            owned = inside & (request >= 0)
        else:
            request = tl.load(owners + row)
            owned = inside & (place // page_size < columns)
        at = table + tl.maximum(request, 0).to(tl.int64) * table_stride + place // page_size
        page = tl.load(at, mask=owned, other=0)
        cell = tl.where(owned, page * page_size + place % page_size, -1)
    if offset is not None:
        cell = place + tl.load(offset + row)
    return tl.where(inside, cell, -1)


@triton.jit(early=())
def choose_kernel(
    score, lengths, starts, floors, lists, counts, table, bounds, owners, offset, out,
    stride, width, chunks, topk, table_stride, columns, requests, page_size,
    ROOM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, KP: tl.constexpr,
    BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Select the topk best positions of a row and write their outputs. Candidates come from the
    row's lists, or are the whole row if it is short or its bound was too high. Each iteration
    processes ROOM candidates together with the best so far.

    Args:
        floors, lists, counts: of `bound_kernel` and `list_kernel`, or None.
        table: [rows, columns]; bounds or owners: as in `cell_of`.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, KP)
    into = out + row * topk
    if tl.load(lengths + row) <= topk:
        cell = cell_of(
            column, column < tl.load(lengths + row), row, table, bounds, owners, offset,
            table_stride, columns, requests, page_size, BP,
        )  # fmt: skip
        tl.store(into + column, cell, mask=column < topk)
    else:
        start, first, end = candidates_of(lengths, starts, row, width)
        amount = end - first
        at = tl.arange(0, ROOM)
        listed = False
        least = tl.full([], 0, tl.uint32)
        kept = 0
        if lists is not None:
            above, level, begins, total = take_lists(
                counts + row * chunks, amount, topk, ROOM, CHUNK, CHUNKS
            )
            lists += row * chunks * CHUNK
            least = ordered(tl.load(floors + row))
            listed = total >= topk
            amount = tl.where(listed, total, amount)
            if total == topk:
                place, order = load_listed(
                    lists, above, level, begins, at, at < topk, CHUNK, CHUNKS, True
                )
                place = cell_of(
                    first + place, at < topk, row, table, bounds, owners, offset,
                    table_stride, columns, requests, page_size, BP,
                )  # fmt: skip
                tl.store(into + order, place, mask=at < topk)
                kept = -1
        seen = 0
        while kept >= 0:
            # The `kept` best so far precede the new candidates, as in the row.
            fresh = at - kept
            slot = seen + fresh
            inside = slot < amount
            place = slot
            if lists is not None:  # noqa: SIM102
                if listed:
                    new = inside & (fresh >= 0)
                    place, _ = load_listed(
                        lists, above, level, begins, slot, new, CHUNK, CHUNKS, False
                    )
            place = tl.where(fresh < 0, tl.load(into + at, mask=fresh < 0, other=0), first + place)
            value = load_scores(score, row, start, place, inside, stride, float("-inf"))
            taken, order, found = best_of(
                value, inside, least, listed, tl.minimum(amount - seen + kept, ROOM), topk, ROOM
            )
            seen += ROOM - kept
            kept = tl.where(seen < amount, found, -1)
            tl.debug_barrier()
            if kept >= 0:
                tl.store(into + order, place, mask=taken)
                tl.debug_barrier()
            else:
                cell = cell_of(
                    place, taken, row, table, bounds, owners, offset,
                    table_stride, columns, requests, page_size, BP,
                )  # fmt: skip
                tl.store(into + order, cell, mask=taken)
                tl.store(into + column, -1, mask=(column >= found) & (column < topk))
