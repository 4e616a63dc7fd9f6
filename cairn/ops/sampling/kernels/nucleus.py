"""The nucleus of a row, by a team: see `teams`.

Where its threshold lies is guessed from how large some numbers of each part are, all others being
like them. The team sums up what reaches a few numbers around the guess, and goes on from what that
tells, until each part can list its numbers that are still in question: one step, mostly. All lists
together are searched by every program.

Sums are in float64: in an order that the split of the row gives.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import bits_of
from cairn.ops.sampling.kernels.largest import columns
from cairn.ops.sampling.kernels.teams import (
    load_part,
    meet,
    number_of,
    odd_total,
    of_parts,
    part_at,
    peak_key_of,
    seat_of,
    store_piece,
    store_shares,
    sum_of_lines,
    told,
    tops_of,
)


@triton.jit
def mass_of(pieces, LINES: tl.constexpr):
    """The sum of a part, float64."""
    mass = tl.zeros([LINES], tl.float64)
    for n in tl.static_range(len(pieces)):
        mass += sum_of_lines(pieces[n].to(tl.float64), LINES)
    return tl.sum(mass, 0)


@triton.jit
def first_bin(BINS: tl.constexpr):
    """The bits of the number with which bins begin that end with 1, each half a power of two."""
    return (127 << 23) - (BINS << 22)


@triton.jit
def sizes_of(pieces, BINS: tl.constexpr):
    """How many numbers of a part lie in each bin [BINS] int32; smaller and larger ones count in the
    first and the last. Of as many numbers as a piece has, from all over the part."""
    turn = tl.arange(0, pieces[0].shape[0]) % 4
    some = pieces[len(pieces) // 8]
    for n in tl.static_range(1, 4):
        some = tl.where(turn == n, pieces[(2 * n + 1) * len(pieces) // 8], some)
    place = (bits_of(some) - first_bin(BINS)) >> 22
    return tl.histogram(tl.minimum(tl.maximum(place, 0), BINS - 1), BINS)


@triton.jit
def guess_of(sizes, spare, parts, factor, PARTS: tl.constexpr, BINS: tl.constexpr):
    """Near which number, as bits, all below sum up to spare, and how far off that may be: both
    int32. sizes [parts, BINS]: `sizes_of` what stands for `factor` times as many numbers."""
    p = tl.arange(0, PARTS)[:, None]
    j = tl.arange(0, BINS)
    each = tl.load(sizes + p * BINS + j[None, :], mask=p < parts, other=0, cache_modifier=".cg")
    count = tl.sum(each, 0)
    middle = number_of(first_bin(BINS) + (j << 22) + (1 << 21))
    mass = count.to(tl.float32) * middle * factor
    below = tl.cumsum(mass, 0)
    small = below <= spare
    found = tl.sum(small.to(tl.int32), 0)
    rest = spare - tl.max(tl.where(small, below, 0.0), 0)
    own = tl.max(tl.where(j == found, mass, 0.0), 0)
    # Behind the last bin there is nothing.
    part = tl.minimum(tl.maximum(rest / tl.where(own > 0.0, own, 1.0), 0.0), 1.0)
    key = first_bin(BINS) + (found << 22) + (part * (1 << 22)).to(tl.int32)
    # A sum of n numbers of one size is off by 1 / sqrt(n) of itself: of 1 / sqrt(2 n) powers of e
    # in their size, if n lie in each. These are three bins.
    near = tl.sum(tl.where((j >= found - 1) & (j <= found + 1), count, 0), 0)
    return key, (8.7e6 / tl.sqrt_rn(near.to(tl.float32) + 1.0)).to(tl.int32)


@triton.jit
def again(count):
    """1.0, but not known to the compiler, from what changes in a loop, int32 >= 0: what is made of
    numbers times that is made when it is wanted, not held from the last time."""
    return number_of(0x3F800000 | (count >> 31))


@triton.jit
def added(a, b, c, d, e, f, g, h):
    """Two quadruples, number by number."""
    return a + e, b + f, c + g, d + h


@triton.jit
def masses_of(pieces, one, two, three, four, phase, LINES: tl.constexpr):
    """What a part has from each of four numbers on: sums, float64."""
    unit = again(phase)
    first = tl.zeros([LINES], tl.float64)
    second = tl.zeros([LINES], tl.float64)
    third = tl.zeros([LINES], tl.float64)
    fourth = tl.zeros([LINES], tl.float64)
    for n in tl.static_range(len(pieces)):
        x = pieces[n]
        wide = (x * unit).to(tl.float64)
        first += sum_of_lines(tl.where(x >= one, wide, 0.0), LINES)
        second += sum_of_lines(tl.where(x >= two, wide, 0.0), LINES)
        third += sum_of_lines(tl.where(x >= three, wide, 0.0), LINES)
        fourth += sum_of_lines(tl.where(x >= four, wide, 0.0), LINES)
    return tl.reduce((first, second, third, fourth), 0, added)


@triton.jit
def inside(mark, low, high):
    """The number in (low, high) that is nearest to mark."""
    return tl.minimum(tl.maximum(mark, low + 1), high - 1)


@triton.jit
def next_marks(low, high, mass_low, mass_high, wanted):
    """Four numbers in (low, high), of which two divide it, and two lie where the threshold does if
    the mass between is spread evenly."""
    span = high - low
    even = ((mass_low - wanted) / (mass_low - mass_high) * span.to(tl.float64)).to(tl.int32)
    near = tl.maximum(span >> 5, 1)
    return (
        inside(low + even - near, low, high),
        inside(low + even + near, low, high),
        inside(low + span // 3, low, high),
        inside(high - span // 3, low, high),
    )


@triton.jit
def moved(low, high, at_low, at_high, mark, masses, reach):
    """[low, high) after a mark, and what there is from each bound on: from the mark on there is
    `masses`, as much as is wanted or not."""
    up, down = reach & (mark > low), (reach == 0) & (mark < high)
    at_low, at_high = tl.where(up, masses, at_low), tl.where(down, masses, at_high)
    return tl.where(up, mark, low), tl.where(down, mark, high), at_low, at_high


@triton.jit
def fits(low, at_low, at_high, SLOTS: tl.constexpr):
    """Whether no part has more than SLOTS numbers between bounds: all are `low` at least. Sums are
    taken to be off by more than they can."""
    most = tl.max(at_low - at_high + at_low * 1e-12, 0)
    return most <= number_of(low).to(tl.float64) * (SLOTS - 1)


@triton.jit
def bracket_of(
    pieces, low, high, at_low, guess, spread, wanted, row, part, parts, tallies, arrivals,
    PARTS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """[low, high) as bits, with the threshold: what reaches low sums up to `wanted`, what reaches
    high does not. Either one number, or `fits`. Also what the parts have from each bound on,
    [PARTS] float64, at_low maybe more than they have; and how often they have met, once before.

    tallies: [n, 2, 4, parts] float64: who stores into one half has seen all arrive that loaded from
    it.
    """
    at_high = tl.zeros([PARTS], tl.float64)
    phase = tl.full([], 1, tl.int32)
    one, two = inside(guess - 4 * spread, low, high), inside(guess - spread, low, high)
    three, four = inside(guess + spread, low, high), inside(guess + 4 * spread, low, high)
    while (high - low > 1) & (fits(low, at_low, at_high, SLOTS) == 0):
        first, second, third, fourth = masses_of(
            pieces, number_of(one), number_of(two), number_of(three), number_of(four), phase, LINES
        )
        at = tallies + (row * 2 + phase % 2) * 4 * parts
        tl.store(at + part, first)
        tl.store(at + parts + part, second)
        tl.store(at + 2 * parts + part, third)
        tl.store(at + 3 * parts + part, fourth)
        phase += 1
        meet(arrivals, row, phase * parts, PARTS, APART)
        by_one = of_parts(at, parts, 0.0, PARTS)
        by_two = of_parts(at + parts, parts, 0.0, PARTS)
        by_three = of_parts(at + 2 * parts, parts, 0.0, PARTS)
        by_four = of_parts(at + 3 * parts, parts, 0.0, PARTS)
        reach = tl.sum(by_one, 0) >= wanted
        low, high, at_low, at_high = moved(low, high, at_low, at_high, one, by_one, reach)
        reach = tl.sum(by_two, 0) >= wanted
        low, high, at_low, at_high = moved(low, high, at_low, at_high, two, by_two, reach)
        reach = tl.sum(by_three, 0) >= wanted
        low, high, at_low, at_high = moved(low, high, at_low, at_high, three, by_three, reach)
        reach = tl.sum(by_four, 0) >= wanted
        low, high, at_low, at_high = moved(low, high, at_low, at_high, four, by_four, reach)
        one, two, three, four = next_marks(low, high, tl.sum(at_low, 0), tl.sum(at_high, 0), wanted)
    return low, high, at_low, at_high, phase


@triton.jit
def list_between(pieces, low, high, numbers, LINES: tl.constexpr, SLOTS: tl.constexpr):
    """Write the numbers in [low, high) into numbers [SLOTS] float32, 0 behind them."""
    tl.store(numbers + tl.arange(0, SLOTS), tl.zeros([SLOTS], tl.float32))
    each = tl.zeros([LINES], tl.int32)
    for n in tl.static_range(len(pieces)):
        tile = columns(pieces[n], LINES)
        each += tl.sum(((tile >= low) & (tile < high)).to(tl.int32), 0)
    if tl.max(each, 0) > 0:
        # Behind what is written above.
        tl.debug_barrier()
        before = tl.cumsum(each, 0) - each
        # The same numbers, but not the same comparisons: they would be kept from above.
        low += 0.0
        high += 0.0
        for n in tl.static_range(len(pieces)):
            tile = columns(pieces[n], LINES)
            hit = ((tile >= low) & (tile < high)).to(tl.int32)
            place = before[None, :] + tl.cumsum(hit, 0) - 1
            live = (hit > 0) & (place < SLOTS)
            # Stores want rows.
            tl.store(numbers + tl.trans(place), tl.trans(tile), mask=tl.trans(live))
            before += tl.sum(hit, 0)


@triton.jit
def load_lists(numbers, parts, PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr):
    """The lists of a row's parts in pieces, 0 behind them."""
    PIECE: tl.constexpr = 4 * LINES
    listed = ()
    for begin in tl.static_range(0, PARTS * SLOTS, PIECE):
        i = begin + tl.arange(0, PIECE)
        piece = tl.load(numbers + i, mask=i < parts * SLOTS, other=0.0, cache_modifier=".cg")
        listed = listed + (piece,)  # type: ignore[assignment]  # noqa: RUF005
    return listed


@triton.jit
def search_lists(listed, low, high, wanted, LINES: tl.constexpr):
    """[low, high) with one float, or with one of the listed numbers, where their sum gets to what
    is wanted; and what is listed from each bound on. All reach low, none high."""
    mass_low = mass_of(listed, LINES)
    mass_high = tl.full([], 0.0, tl.float64)
    # Two numbers were twice as much as low, and there are too few to be off by half of it.
    while (high - low > 1) & (mass_low - mass_high > 1.5 * number_of(low).to(tl.float64)):
        one, two, three, four = next_marks(low, high, mass_low, mass_high, wanted)
        first, second, third, fourth = masses_of(
            listed, number_of(one), number_of(two), number_of(three), number_of(four), low, LINES
        )
        low, high, mass_low, mass_high = moved(
            low, high, mass_low, mass_high, one, first, first >= wanted
        )
        low, high, mass_low, mass_high = moved(
            low, high, mass_low, mass_high, two, second, second >= wanted
        )
        low, high, mass_low, mass_high = moved(
            low, high, mass_low, mass_high, three, third, third >= wanted
        )
        low, high, mass_low, mass_high = moved(
            low, high, mass_low, mass_high, four, fourth, fourth >= wanted
        )
    return low, high, mass_low, mass_high


@triton.jit
def equals_of(pieces, number, LINES: tl.constexpr):
    """How many numbers of a part are equal to one."""
    each = tl.zeros([LINES], tl.int32)
    for n in tl.static_range(len(pieces)):
        each += sum_of_lines((pieces[n] == number).to(tl.int32), LINES)
    return tl.sum(each, 0)


@triton.jit
def nucleus_of(
    pieces, wanted, total, peak_key, at_low, width, row, part, parts,
    sizes, tallies, numbers, equals, arrivals,
    PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """The least number that is kept of a row whose sum, `total`, is not less than what is wanted;
    the sum of all that is kept; and how many of a part's numbers that are equal to the least are
    kept, the first ones: -1 if all are."""
    spare = total - wanted
    guess, spread = guess_of(
        sizes + row * parts * BINS, spare.to(tl.float32), parts, len(pieces), PARTS, BINS
    )
    # All below sum up to half of what is not wanted.
    low = tl.maximum(bits_of((spare * 0.5 / width).to(tl.float32)), 1)
    high = peak_key + 1
    low, high, at_low, at_high, phase = bracket_of(
        pieces, tl.minimum(low, peak_key), high, at_low, guess, spread, wanted,
        row, part, parts, tallies, arrivals, PARTS, APART, LINES, SLOTS,
    )  # fmt: skip
    mass_low, mass_high = tl.sum(at_low, 0), tl.sum(at_high, 0)
    if high - low > 1:
        numbers += row * parts * SLOTS
        list_between(pieces, number_of(low), number_of(high), numbers + part * SLOTS, LINES, SLOTS)
        phase += 1
        meet(arrivals, row, phase * parts, PARTS, APART)
        listed = load_lists(numbers, parts, PARTS, LINES, SLOTS)
        low, high, more_low, more_high = search_lists(listed, low, high, wanted - mass_high, LINES)
        mass_low, mass_high = mass_high + more_low, mass_high + more_high
    least = number_of(low)
    few = tl.full([], -1, tl.int32)
    if high - low == 1:
        # Equal ones: kept one after the other while the sum before is less than wanted.
        weight = least.to(tl.float64)
        room = tl.minimum(tl.math.ceil((wanted - mass_high) / weight), 1073741824.0)
        # Of a low that is the first one it is not known what reaches it.
        if ((room + 0.5) * weight < mass_low - mass_high) | (mass_low >= total):
            all_equals = told(
                equals + row * parts, part, equals_of(pieces, least, LINES), parts, 0,
                arrivals, row, (phase + 1) * parts, PARTS, APART,
            )  # fmt: skip
            before = tl.sum(tl.where(tl.arange(0, PARTS) < part, all_equals, 0), 0)
            few = tl.maximum(room.to(tl.int32) - before, 0)
            taken = tl.minimum(room, tl.sum(all_equals, 0).to(tl.float64))
            mass_low = mass_high + taken * weight
    return least, mass_low, few


@triton.jit
def store_first(
    out, row, part, width, pieces, least, few, total,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """`store_shares` that keeps but the first few of the part's numbers that are equal to
    `least`."""
    at, begin = part_at(row * width, part, PART, ALIGN)
    for n in tl.static_range(len(pieces)):
        equal = (pieces[n] == least).to(tl.int32)
        kept = (pieces[n] > least) | ((equal > 0) & (tl.cumsum(equal, 0) <= few))
        few -= tl.sum(equal, 0)
        share = tl.where(kept, pieces[n], 0.0) / total
        store_piece(out + at + n * PIECE, begin + n * PIECE, width, share)


@triton.jit
def top_p_kernel(
    x, top_p, out, tickets, arrivals, peaks, masses, sizes, tallies, numbers, equals,
    stride, width, parts, places,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    SLOTS: tl.constexpr, BINS: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x where it is in the nucleus of its row, divided by the sum of that; else 0.

    Written: peaks [n, parts] int32, masses [n, parts] float64, and sizes [n, parts, BINS] int32 of
    some numbers of each part; tallies [n, 2, 4, parts] float64; numbers [n, parts, SLOTS] float32,
    the lists; equals [n, parts] int32, the numbers that are as large as the least that is kept.
    """
    row, part = seat_of(tickets, parts, places, LATE)
    share = tl.load(top_p + row)
    pieces = load_part(x, row, part, stride, width, 0.0, PART, PIECE, ALIGN)
    own_peak = tl.max(tops_of(pieces, LINES), 0)
    tl.store(peaks + row * parts + part, peak_key_of(pieces, own_peak, LINES))
    tl.store(masses + row * parts + part, mass_of(pieces, LINES))
    tl.store(sizes + (row * parts + part) * BINS + tl.arange(0, BINS), sizes_of(pieces, BINS))
    meet(arrivals, row, parts, PARTS, APART)
    peak_key = tl.max(of_parts(peaks + row * parts, parts, 0, PARTS), 0)
    mass = of_parts(masses + row * parts, parts, 0.0, PARTS)
    threshold = 0.0
    total = odd_total(peak_key)
    few = tl.full([], -1, tl.int32)
    if peak_key < 0x7F800000:
        kept = tl.sum(mass, 0)
        # The largest is kept whatever the share.
        wanted = tl.maximum(share.to(tl.float64), 1e-300)
        if (share < 1.0) & (kept >= wanted):
            threshold, kept, few = nucleus_of(
                pieces, wanted, kept, peak_key, mass, width, row, part, parts,
                sizes, tallies, numbers, equals, arrivals,
                PARTS, LINES, SLOTS, BINS, APART,
            )  # fmt: skip
        total = tl.maximum(kept.to(tl.float32), 1.1754943508222875e-38)
    if few < 0:
        store_shares(out, row, part, width, pieces, threshold, total, PART, PIECE, ALIGN)
    else:
        store_first(out, row, part, width, pieces, threshold, few, total, PART, PIECE, ALIGN)
