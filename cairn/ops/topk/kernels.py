"""Kernels of the selections: chunks of a row are narrowed to their best, then those to the best.

No list has a size that scores could overflow, nothing is atomic: the result is exact and the same
on every run.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.landmark.kernels.select import largest
from cairn.ops.sampling.kernels.filters import ordered


@triton.jit
def request_of(bounds, row, requests, BP: tl.constexpr):
    """q with bounds[q] <= row < bounds[q + 1]; -1 if there is none."""
    at = tl.arange(0, BP)
    begin = tl.load(bounds + at, mask=at <= requests, other=2147483647)
    request = tl.sum((begin <= row).to(tl.int32), 0) - 1
    return tl.where(request < requests, request, -1)


@triton.jit
def cell_of(
    place, inside, row, table, bounds, offset, table_stride, requests, page_size, BP: tl.constexpr
):
    """What stands for the positions place [N] of a row: see the ops."""
    cell = place
    if table is not None:
        request = request_of(bounds, row, requests, BP)
        owned = inside & (request >= 0)
        at = table + tl.maximum(request, 0).to(tl.int64) * table_stride + place // page_size
        page = tl.load(at, mask=owned, other=0)
        cell = tl.where(owned, page * page_size + place % page_size, -1)
    if offset is not None:
        cell = place + tl.load(offset + row)
    return tl.where(inside, cell, -1)


@triton.jit
def narrow_kernel(
    score, places, counts, lengths, starts, next_score, next_places, next_counts,
    stride, width, lines, topk, N: tl.constexpr,
):  # fmt: skip
    """The topk best of N scores of a row, in order of position, for the next level.

    Args:
        score: of the first level [B, width]; then [B, width / lines, lines], of which counts
            [B, width / lines] are filled in every line, their positions in places.
        places, counts: None on the first level.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    length = tl.load(lengths + row)
    if length > topk:
        start = 0
        if starts is not None:
            start = tl.load(starts + row)
        at = chunk * N + tl.arange(0, N)
        place, value, inside = candidates(
            score, places, counts, row, start, length, at, stride, width, lines
        )
        total = tl.sum(inside.to(tl.int32), 0)
        taken, order, found = largest(value, inside, total, topk, N)
        line = row * tl.num_programs(1) + chunk
        tl.store(next_counts + line, found)
        tl.store(next_score + line * topk + order, value, mask=taken)
        tl.store(next_places + line * topk + order, place, mask=taken)


@triton.jit
def candidates(score, places, counts, row, start, length, at, stride, width, lines):
    """Positions, scores and whether there is one, of a row's candidates at [N]."""
    if places is None:
        # What would lie in front of the row is passed over.
        place = at + tl.maximum(-start, 0)
        column = place.to(tl.int64) + start
        inside = (place < length) & (column >= 0) & (column < width)
        value = tl.load(score + row * stride + column, mask=inside, other=0.0)
    else:
        number = tl.load(counts + row * (width // lines) + at // lines, mask=at < width, other=0)
        inside = (at < width) & (at % lines < number)
        place = tl.load(places + row * width + at, mask=inside, other=0)
        value = tl.load(score + row * width + at, mask=inside, other=0.0)
    return place, tl.where(value == value, value, float("-inf")), inside


@triton.jit
def choose_kernel(
    score, places, counts, lengths, starts, table, bounds, offset, out,
    stride, width, lines, topk, table_stride, requests, page_size,
    N: tl.constexpr, KP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The topk best of a row's last N candidates, as what stands for their positions."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    column = tl.arange(0, KP)
    into = out + row * topk
    if length <= topk:
        whole = cell_of(
            column, column < length, row, table, bounds, offset,
            table_stride, requests, page_size, BP,
        )  # fmt: skip
        tl.store(into + column, whole, mask=column < topk)
    else:
        start = 0
        if starts is not None:
            start = tl.load(starts + row)
        at = tl.arange(0, N)
        place, value, inside = candidates(
            score, places, counts, row, start, length, at, stride, width, lines
        )
        total = tl.sum(inside.to(tl.int32), 0)
        taken, order, found = largest(value, inside, total, topk, N)
        cell = cell_of(
            place, taken, row, table, bounds, offset, table_stride, requests, page_size, BP
        )
        tl.store(into + order, cell, mask=taken)
        tl.store(into + column, -1, mask=(column >= found) & (column < topk))


@triton.jit
def preferred(value, place):
    """int64 that orders a row's numbers: the larger first, NaN before all, of equal ones the first
    place."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - place)


@triton.jit
def largest_of(key):
    """The largest of int64 [N] that `preferred` gave, or that stand for none: by maxima of int32,
    which a warp finds in one instruction."""
    high = (key >> 32).to(tl.int32)
    # Not negative, so that as an int32 it is in the same order.
    low = (key & 0x7FFFFFFF).to(tl.int32)
    best = tl.max(high, 0)
    rest = tl.max(tl.where(high == best, low, 0), 0)
    return (best.to(tl.int64) << 32) | rest


@triton.jit
def few_kernel(
    x, values, indices, stride, width, topk,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, KP: tl.constexpr,
    LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """values, indices [rows, topk]: the largest numbers of one row, one after the other.

    Place i is of group i % GROUPS. The best of every group are held; a group whose best is taken is
    read again, for the best behind that.

    Args:
        SIZE: numbers of a group, padded; STEP: those that are read at once; LANES: SIZE, at least
            the threads of a program, so that each has one.
        WHOLE: groups are not padded.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    group = tl.arange(0, GROUPS)
    nothing = -9223372036854775808
    best = tl.full([GROUPS], nothing, tl.int64)
    for begin in range(0, SIZE, STEP):
        place = (begin + tl.arange(0, STEP))[:, None] * GROUPS + group[None, :]
        if WHOLE:
            key = preferred(tl.load(x + place), place)
        else:
            value = tl.load(x + place, mask=place < width, other=0.0)
            key = tl.where(place < width, preferred(value, place), nothing)
        best = tl.maximum(best, tl.max(key, 0))
    k = tl.arange(0, KP)
    taken = tl.zeros([KP], tl.int32)
    line = tl.arange(0, LANES)
    for i in range(topk):
        first = largest_of(best)
        at = 0x7FFFFFFF - (first & 0x7FFFFFFF).to(tl.int32)
        taken = tl.where(k == i, at, taken)
        own = at % GROUPS
        place = line * GROUPS + own
        there = (line < SIZE) & (place < width)
        value = tl.load(x + place, mask=there, other=0.0)
        key = tl.where(there, preferred(value, place), nothing)
        behind = largest_of(tl.where(key < first, key, nothing))
        best = tl.where(group == own, behind, best)
    inside = k < topk
    to = row * topk + k
    tl.store(indices + to, taken.to(tl.int64), mask=inside)
    tl.store(values + to, tl.load(x + taken, mask=inside), mask=inside)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if there is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def first_kernel(
    x, values, indices, stride, width,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """values, indices [rows]: the largest number of one row, the first of equal ones.

    Groups as in `few_kernel`, of which numbers are held without their places: the group that has
    the largest is read again, or if there are several, their numbers in order up to it.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    group = tl.arange(0, GROUPS)
    most = tl.full([GROUPS], float("-inf"), tl.float32)
    for begin in range(0, SIZE, STEP):
        place = (begin + tl.arange(0, STEP))[:, None] * GROUPS + group[None, :]
        if WHOLE:
            value = tl.load(x + place)
        else:
            value = tl.load(x + place, mask=place < width, other=float("-inf"))
        most = larger(most, tl.reduce(value.to(tl.float32), 0, larger))
    best = ordered(most)
    first = tl.max(best, 0)
    tied = best == first
    # Nowhere yet.
    at = tl.full([], 0x7FFFFFFF, tl.int32)
    # A short row of float32 is read as a whole sooner than a group of it.
    if SIZE > STEP or x.dtype.element_ty != tl.float32:  # noqa: SIM102
        if tl.sum(tied.to(tl.int32), 0) == 1:
            place = tl.arange(0, SIZE) * GROUPS + tl.min(tl.where(tied, group, GROUPS), 0)
            value = tl.load(x + place, mask=place < width, other=0.0)
            found = (place < width) & (ordered(value) == first)
            at = tl.min(tl.where(found, place, 0x7FFFFFFF), 0)
    begin = 0
    while at == 0x7FFFFFFF:
        place = (begin + tl.arange(0, STEP))[:, None] * GROUPS + group[None, :]
        shown = tied[None, :] & (place < width)
        value = tl.load(x + place, mask=shown, other=0.0)
        found = shown & (ordered(value) == first)
        at = tl.min(tl.min(tl.where(found, place, 0x7FFFFFFF), 0), 0)
        begin += STEP
    tl.store(indices + row, at.to(tl.int64))
    tl.store(values + row, tl.load(x + at))
