"""Kernels of the selections.

Of a long row a sample says what its best surely reach; chunks list what does, and the best of the
lists are taken. Neither an unlike sample nor lists longer than one program takes at once change the
result, which is the same on every run: nothing is atomic.
"""

from __future__ import annotations

from cairn.ops import gpu
from cairn.ops.early import await_previous, launch_next
from cairn.ops.gpu import tl, triton
from cairn.ops.landmark.kernels.largest import largest_from, ordered
from cairn.ops.sampling.kernels.bounds import reached_by

NEAR = gpu.constant(1 << 20)
"""How far above a bound, as keys, what is chosen is looked for at first: an eighth of the numbers
from a power of two to the next."""


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
def candidates_of(lengths, starts, row, width):
    """Where a row begins, and the first position that is a candidate and the one behind the last:
    what would lie outside of the row is passed over."""
    start = 0
    if starts is not None:
        start = tl.load(starts + row)
    first = tl.maximum(-start, 0)
    # A start far outside does not overflow.
    end = tl.minimum(tl.load(lengths + row).to(tl.int64), width - tl.minimum(start, width))
    return start, first, tl.maximum(end.to(tl.int32), first)


@triton.jit
def load_scores(score, row, start, place, inside, stride):
    """Scores at positions place [N] of a row; NaN counts as -inf."""
    at = score + row * stride + (place.to(tl.int64) + start)
    value = tl.load(at, mask=inside, other=0.0)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def number_of(key):
    """The float32 of which `ordered` gives the key; -inf for lower ones."""
    flipped = (tl.maximum(key, 0x007FFFFF) ^ 0x80000000).to(tl.int32, bitcast=True)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_kernel(
    score, lengths, starts, floors, stride, width, topk,
    ROOM: tl.constexpr, SAMPLE: tl.constexpr, SURE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """floors [B] float32: what topk scores of a row reach, and not many others.

    The scores at SAMPLE positions tell, by SURE standard deviations. Of rows that have no more than
    ROOM candidates nobody asks.
    """
    launch_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    start, first, end = candidates_of(lengths, starts, row, width)
    number = end - first
    if number > ROOM:
        # One of each of as many parts of the row, anywhere in it: scores that repeat do not always
        # meet it at the same place.
        i = tl.arange(0, SAMPLE)
        within = (i.to(tl.uint32) * 0x9E3779B1) >> 16
        place = (i.to(tl.int64) * number + ((within.to(tl.int64) * number) >> 16)) // SAMPLE
        value = load_scores(score, row, start, first + place.to(tl.int32), i < SAMPLE, stride)
        part = topk / number.to(tl.float32)
        mean = part * SAMPLE
        # Where the mean is small, more lie far above it than a normal distribution has.
        most = mean + SURE * tl.sqrt(mean * (1.0 - part)) + SURE * SURE / 3
        wanted = most.to(tl.int32) + 1
        key = (ordered(value) >> 1).to(tl.int32)
        bound = reached_by(key, wanted, wanted + wanted // 16)
        tl.store(floors + row, number_of(bound.to(tl.uint32) << 1))


@triton.jit
def list_kernel(
    score, lengths, starts, floors, lists, counts, stride, width,
    ROOM: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What exceeds the row's bound among CHUNK of its candidates, in order from the front of a
    list, and what is equal to it, from the back: as places in the chunk, and 1 << 16 times how many
    of the other kind lie before.

    Args:
        lists: [B, chunks, CHUNK] int32; counts: [B, chunks] int32, those above and 1 << 16 times
            those that are equal.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    start, first, end = candidates_of(lengths, starts, row, width)
    # Lines of what a warp loads at once: places among them are counted without waiting for others.
    at = tl.arange(0, CHUNK // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    place = first + chunk * CHUNK + at
    inside = place < end
    value = load_scores(score, row, start, place, inside, stride)
    await_previous(EARLY)
    if (end - first > ROOM) & (chunk * CHUNK < end - first):
        bound = tl.load(floors + row)
        above = inside & (value > bound)
        level = inside & (value == bound)
        kinds = above.to(tl.int32) + (level.to(tl.int32) << 16)
        of_line = tl.sum(kinds, 1)
        found = tl.cumsum(kinds, 1) + (tl.cumsum(of_line, 0) - of_line)[:, None]
        number = tl.sum(of_line, 0)
        line = row * tl.num_programs(1) + chunk
        tl.store(counts + line, number)
        lists += line * CHUNK
        if number <= 0xFFFF:
            tl.store(lists + found - 1, at, mask=above)
        else:
            higher = found & 0xFFFF
            equal = found >> 16
            to = tl.where(above, higher - 1, CHUNK - equal)
            other = tl.where(above, equal, higher)
            tl.store(lists + to, at + (other << 16), mask=above | level)


@triton.jit
def take_lists(counts, amount, topk, ROOM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Of every list [CHUNKS] of a row how many lie above, how many of its equal ones are taken, and
    how many are taken from the lists in front of it; and from all of them.

    All above are taken, and of the equal ones the first, if the others are less than topk. A row of
    no more candidates than ROOM has none.
    """
    c = tl.arange(0, CHUNKS)
    count = tl.load(counts + c, mask=(amount > ROOM) & (c * CHUNK < amount), other=0)
    above = count & 0xFFFF
    level = count >> 16
    missing = topk - tl.sum(above, 0)
    if missing <= 0:
        level = tl.zeros_like(level)
    else:
        level = tl.minimum(level, tl.maximum(missing - (tl.cumsum(level, 0) - level), 0))
    count = above + level
    return above, level, tl.cumsum(count, 0) - count, tl.sum(count, 0)


@triton.jit
def load_listed(
    lists, above, level, begins, slot, inside, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SETTLED: tl.constexpr,
):  # fmt: skip
    """Positions number slot [N] among those taken from a row's lists, of each first those above;
    and with SETTLED where each comes in the order of all. The rest: of `take_lists`."""
    chunk = tl.zeros_like(slot)
    step = tl.full([], CHUNKS // 2, tl.int32)
    while step > 0:
        chunk = tl.where(tl.gather(begins, chunk + step, 0) <= slot, chunk + step, chunk)
        step //= 2
    begin = tl.gather(begins, chunk, 0)
    place = slot - begin
    order = slot
    to = place
    if SETTLED:
        behind = place - tl.gather(above, chunk, 0)
        to = tl.where(behind < 0, place, CHUNK - 1 - behind)
    entry = tl.load(lists + chunk.to(tl.int64) * CHUNK + to, mask=inside, other=0)
    if SETTLED:
        other = entry >> 16
        equal = tl.gather(level, chunk, 0)
        order = begin + tl.where(behind < 0, place + tl.minimum(other, equal), behind + other)
    return chunk * CHUNK + (entry & 0xFFFF), order


@triton.jit
def best_of(value, inside, least, listed, total, topk, N: tl.constexpr):
    """What `largest` gives; listed: inside all reach the key `least`, and what is chosen lies close
    above it."""
    key = tl.where(inside, ordered(value), 0)
    low = least
    high = tl.full([], 0xFFFFFFFF, tl.uint32)
    reach = tl.full([], NEAR, tl.uint32)
    if not listed:
        low = tl.min(tl.where(inside, key, 0xFFFFFFFF), 0)
        high = tl.max(key, 0) + 1
        reach = high
    return largest_from(key, inside, low, high, reach, total, topk, N)


@triton.jit
def choose_kernel(
    score, lengths, starts, floors, lists, counts, table, bounds, offset, out,
    stride, width, chunks, topk, table_stride, requests, page_size,
    ROOM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, KP: tl.constexpr,
    BP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The topk best of a row, as what stands for their positions.

    Of what its lists hold, or of all where it has none: because it is short, or because its bound
    was too high for topk scores. ROOM candidates at once, and with the best of those the next.

    Args:
        floors, lists, counts: of `bound_kernel` and `list_kernel`, or None.
    """
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    column = tl.arange(0, KP)
    into = out + row * topk
    if length <= topk:
        cell = cell_of(
            column, column < length, row, table, bounds, offset,
            table_stride, requests, page_size, BP,
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
                cell = cell_of(
                    first + place, at < topk, row, table, bounds, offset,
                    table_stride, requests, page_size, BP,
                )  # fmt: skip
                tl.store(into + order, cell, mask=at < topk)
                kept = -1
        seen = 0
        while kept >= 0:
            # The best so far come first, as they do in the row.
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
            value = load_scores(score, row, start, place, inside, stride)
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
                    place, taken, row, table, bounds, offset, table_stride, requests, page_size, BP
                )
                tl.store(into + order, cell, mask=taken)
                tl.store(into + column, -1, mask=(column >= found) & (column < topk))
