"""The k largest elements of a row, without sorting.

`largest` searches for the k-th largest of numbers in registers, by counting what reaches trial
values; `bound_kernel` and `list_kernel` leave few candidates of a long row for it. Results are
exact: an unrepresentative sample or long lists only cost time. They are the same on every run:
there are no atomics. Of equal numbers those with the lower index are preferred.
"""

from __future__ import annotations

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, launch_next

NEAR = gpu.constant(1 << 20)
"""How far above a bound, as keys, what is chosen is looked for at first: an eighth of the numbers
from a power of two to the next."""


@triton.jit
def ordered(value):
    """float32 as uint32 with the same order. The largest uint32 stands for no float that a device
    computes (it is a NaN with all bits set)."""
    bits = tl.minimum((value + 0.0).to(tl.int32, bitcast=True), 0x7FFFFFF0)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def largest(value, inside, total, count, N: tl.constexpr):
    """Which of value [N] float32 are among the `count` largest inside (of equal ones the first),
    their ranks 0 .. by position, and how many they are.

    Args:
        total: how many are inside; a larger number will do if at least `count` are.
    """
    key = tl.where(inside, ordered(value), 0)
    low = tl.min(tl.where(inside, key, 0xFFFFFFFF), 0)
    return largest_from(key, inside, low, tl.max(key, 0) + 1, None, total, count, N)


@triton.jit
def largest_from(key, inside, low, high, reach, total, count, N: tl.constexpr):
    """`largest` of `ordered` keys; all keys inside are >= low, none is >= high.

    Args:
        reach: how far above low the search starts, where N > 1024, or None. For results near low.
    """
    wanted = tl.minimum(count, total)
    # Invariant: at least `wanted` keys are >= low, and at_high < wanted keys are >= high.
    at_low = total
    at_high = 0
    while (high - low > 1) & (at_low != wanted):
        # Pack several counts into one integer, for one reduction. A count of up to N takes log2(N)
        # + 1 bits, one of less than N a bit less.
        if N <= 1024:
            step = tl.maximum((high - low) >> 2, 1)
            one = low + step
            two = one + step
            three = two + step
            sums = (key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 10)
            sums = tl.sum(sums + ((key >= three).to(tl.int32) << 20), 0)
            at_one, at_two, at_three = sums & 1023, (sums >> 10) & 1023, sums >> 20
        elif N < 1 << 15:
            step = tl.maximum((high - low) // 3, 1)
            if reach is not None:
                step = tl.minimum(step, reach)
                reach = tl.minimum(reach, 1 << 27) << 3
            one = low + step
            two = one + step
            three = two
            sums = tl.sum((key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 16), 0)
            at_one, at_two = sums & 0xFFFF, sums >> 16
            at_three = at_two
        else:
            step = tl.maximum((high - low) >> 2, 1)
            one = low + step
            two = one + step
            three = two + step
            wide = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 20)
            wide = tl.sum(wide + ((key >= three).to(tl.int64) << 40), 0)
            at_one = (wide & 0xFFFFF).to(tl.int32)
            at_two = ((wide >> 20) & 0xFFFFF).to(tl.int32)
            at_three = (wide >> 40).to(tl.int32)
        # Test trials from three down to one for `high`, and from one up to three for `low`.
        high = tl.where(at_three < wanted, three, high)
        at_high = tl.where(at_three < wanted, at_three, at_high)
        high = tl.where(at_two < wanted, two, high)
        at_high = tl.where(at_two < wanted, at_two, at_high)
        high = tl.where(at_one < wanted, one, high)
        at_high = tl.where(at_one < wanted, at_one, at_high)
        low = tl.where(at_one >= wanted, one, low)
        at_low = tl.where(at_one >= wanted, at_one, at_low)
        low = tl.where(at_two >= wanted, two, low)
        at_low = tl.where(at_two >= wanted, at_two, at_low)
        low = tl.where(at_three >= wanted, three, low)
        at_low = tl.where(at_three >= wanted, at_three, at_low)
    above = inside & (key >= high)
    level = inside & (key >= low) & (key < high)
    missing = wanted - at_high
    # Two counts packed into one integer, for one reduction.
    if N < 1 << 15:
        places = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)
        levels = places >> 16
        places = places & 0xFFFF
    else:
        both = tl.cumsum(above.to(tl.int64) + (level.to(tl.int64) << 32), 0)
        levels = (both >> 32).to(tl.int32)
        places = both.to(tl.int32)
    taken = above | (level & (levels <= missing))
    return taken, places + tl.minimum(levels, missing) - 1, wanted


@triton.jit
def reached_by(key, wanted, enough):
    """A number such that at least `wanted` and, ties aside, at most `enough` of key [N] int32 >= 0
    are >= it."""
    low = 0
    high = tl.max(key, 0) + 1
    reach = enough + 1
    # First trial values: 2 ** -16 and 2 ** -4 of the largest (float32 bits), between which most
    # rows' bounds lie.
    one = tl.maximum(high - (16 << 23), 1)
    two = tl.maximum(high - (4 << 23), 1)
    while (high - low > 1) & (reach > enough):
        # Two counts packed into one integer, for one reduction.
        found = tl.sum((key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 16), 0)
        by_one, by_two = (found & 0xFFFF) >= wanted, (found >> 16) >= wanted
        high = tl.where(by_two, high, tl.where(by_one, two, one))
        low = tl.where(by_two, two, tl.where(by_one, one, low))
        reach = tl.where(by_two, found >> 16, tl.where(by_one, found & 0xFFFF, reach))
        one = low + tl.maximum((high - low) // 3, 1)
        two = tl.minimum(one + tl.maximum((high - low) // 3, 1), high - 1)
    return low


@triton.jit
def candidates_of(lengths, starts, row, width):
    """(start of the row's candidates; first candidate and end of candidates, relative to it),
    clipped to the row."""
    start = 0
    if starts is not None:
        start = tl.load(starts + row)
    first = tl.maximum(-start, 0)
    length = width
    if lengths is not None:
        length = tl.load(lengths + row)
    # In int64 and clamped: a start far outside must not overflow.
    end = tl.minimum(tl.cast(length, tl.int64), width - tl.minimum(start, width))
    return start, first, tl.maximum(end.to(tl.int32), first)


@triton.jit
def load_scores(score, row, start, place, inside, stride, NAN: tl.constexpr):
    """Scores at positions place [N] of a row, float32; NaN counts as NAN."""
    at = score + row * stride + (place.to(tl.int64) + start)
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(value == value, value, NAN)


@triton.jit
def number_of(key):
    """The float32 of which `ordered` gives the key; -inf for lower ones."""
    flipped = (tl.maximum(key, 0x007FFFFF) ^ 0x80000000).to(tl.int32, bitcast=True)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_kernel(
    score, lengths, starts, top_k, floors, stride, width, topk,
    ROOM: tl.constexpr, SAMPLE: tl.constexpr, SURE: tl.constexpr, NAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """floors [B] float32: a value that at least topk scores of the row reach, and not many others,
    estimated from a sample of SAMPLE scores with a margin of SURE standard deviations; with top_k
    [B] each row has its own k. NaN counts as NAN. Rows with at most ROOM candidates have no
    floor."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    start, first, end = candidates_of(lengths, starts, row, width)
    number = end - first
    if top_k is not None:
        topk = tl.load(top_k + row).to(tl.int32)
    if number > ROOM:
        # Stratified sample: one score of each of SAMPLE equal parts of the row, at a pseudo-random
        # place. Periodic scores would bias a regular grid.
        i = tl.arange(0, SAMPLE)
        within = (i.to(tl.uint32) * 0x9E3779B1) >> 16
        place = (i.to(tl.int64) * number + ((within.to(tl.int64) * number) >> 16)) // SAMPLE
        value = load_scores(score, row, start, first + place.to(tl.int32), i < SAMPLE, stride, NAN)
        part = topk / number.to(tl.float32)
        mean = part * SAMPLE
        # The last term allows for the upper tail, which for small means is heavier than a normal
        # distribution's.
        most = mean + SURE * tl.sqrt(mean * (1.0 - part)) + SURE * SURE / 3
        wanted = most.to(tl.int32) + 1
        key = (ordered(value) >> 1).to(tl.int32)
        bound = reached_by(key, wanted, wanted + wanted // 16)
        tl.store(floors + row, number_of(bound.to(tl.uint32) << 1))


@triton.jit(early=("score", "lengths", "starts"))
def list_kernel(
    score, lengths, starts, floors, lists, counts, stride, width,
    ROOM: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, NAN: tl.constexpr,
    PDL: tl.constexpr,
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
    # Each line is what one warp loads at once, so ranks within a line need no wait for other warps.
    at = tl.arange(0, CHUNK // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    place = first + chunk * CHUNK + at
    inside = place < end
    value = load_scores(score, row, start, place, inside, stride, NAN)
    await_previous(PDL)
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
    """Per list of a row [CHUNKS]: the number of entries above the bound, the number of equal ones
    that are taken, and the number taken from earlier lists; and the total taken. All entries above
    are taken, then the first equal ones up to topk. A row with at most ROOM candidates has no
    lists."""
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
    """The positions of entries slot [N] of those taken from a row's lists, each list's entries
    above the bound first; with SETTLED also each one's rank by position. The other arguments: as
    returned by `take_lists`."""
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
    """`largest`; with `listed`, all keys inside are >= `least`, and the chosen ones lie close above
    it."""
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
def least_in_row(score, row, width, stride, wanted, ROOM: tl.constexpr, NAN: tl.constexpr):
    """The `ordered` key of the wanted-th largest number of a row, by passes over the whole row, one
    per bit of the key."""
    least = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    at = tl.arange(0, ROOM)
    while bit > 0:
        reach = tl.zeros([ROOM], tl.int32)
        for begin in range(0, width, ROOM):
            inside = begin + at < width
            value = load_scores(score, row, 0, begin + at, inside, stride, NAN)
            reach += (inside & (ordered(value) >= (least | bit))).to(tl.int32)
        least = tl.where(tl.sum(reach, 0) >= wanted, least | bit, least)
        bit = bit >> 1
    return least


@triton.jit
def nan_in_row(score, row, width, stride, ROOM: tl.constexpr):
    """How many elements of a row are NaN."""
    at = tl.arange(0, ROOM)
    count = tl.zeros([ROOM], tl.int32)
    for begin in range(0, width, ROOM):
        value = tl.load(score + row * stride + begin + at, mask=begin + at < width, other=0.0)
        count += (value != value).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit(early=())
def threshold_kernel(
    score, top_k, floors, lists, counts, thresholds, stride, width, chunks,
    ROOM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """thresholds [B] float32: the top_k-th largest number of each row, where 1 <= top_k < width;
    else -inf. NaN is above all.

    floors, lists, counts: of `bound_kernel` and `list_kernel`, with NAN = inf; or None.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(top_k + row).to(tl.int64)
    threshold = tl.full([], float("-inf"), tl.float32)
    if (wanted >= 1) & (wanted < width):
        k = wanted.to(tl.int32)
        at = tl.arange(0, ROOM)
        place = at
        total = width
        level_taken = 0
        floor = tl.full([], 0, tl.uint32)
        if lists is not None:
            floor = ordered(tl.load(floors + row))
            above, level, begins, total = take_lists(
                counts + row * chunks, width, k, ROOM, CHUNK, CHUNKS
            )
            level_taken = tl.sum(level, 0)
            if (total >= k) & (total <= ROOM):
                place, _order = load_listed(
                    lists + row * chunks * CHUNK, above, level, begins, at, at < total,
                    CHUNK, CHUNKS, False,
                )  # fmt: skip
        if (total < k) | (total > ROOM):
            least = least_in_row(score, row, width, stride, k, ROOM, float("inf"))
        elif level_taken > 0:
            # The k-th largest equals the bound.
            least = floor
        else:
            inside = at < total
            value = load_scores(score, row, 0, place, inside, stride, float("inf"))
            taken, _places, _found = largest(value, inside, total, k, ROOM)
            least = tl.min(tl.where(taken, ordered(value), 0xFFFFFFFF), 0)
        threshold = number_of(least)
        if threshold == float("inf"):  # noqa: SIM102
            if nan_in_row(score, row, width, stride, ROOM) >= k:
                threshold = tl.full([], float("nan"), tl.float32)
    tl.store(thresholds + row, threshold)


@triton.jit(early=())
def mask_kernel(x, top_k, thresholds, out, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [B, width]: x where it reaches its row's threshold or all of the row is kept, else
    -inf."""
    await_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    value = tl.load(x + row * stride + place, mask=inside, other=0.0)
    k = tl.load(top_k + row)
    # NaN reaches nothing.
    kept = value.to(tl.float32) >= tl.load(thresholds + row)
    every = (k < 1) | (k >= width)
    masked = tl.where(every, value, tl.where(kept, value, float("-inf")))
    tl.store(out + row * width + place, masked, mask=inside)
