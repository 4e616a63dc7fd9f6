"""The nucleus of a row, by a team: see `teams`.

Where its threshold lies is guessed from how large some numbers of each part are, all others being
like them. The team sums up what reaches a few numbers around the guess, and goes on from what that
tells, until each part can list its numbers that are still in question: one step, mostly. All lists
together are searched by every program, or, where a token is drawn, by the last that comes alone.

Sums that only lead there are of float32, and tell no more than they can; those that decide are of
float64, in an order that the split of the row gives.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import bits_of, first_beyond
from cairn.ops.sampling.kernels.teams import (
    grouped,
    last_to_come,
    load_part,
    meet,
    number_of,
    odd_total,
    of_parts,
    part_at,
    seat_of,
    store_piece,
    store_shares,
    sum_of_lines,
)


@triton.jit
def mass_of(pieces, LINES: tl.constexpr):
    """The sum of a part, float64."""
    mass = tl.zeros([LINES], tl.float64)
    for n in tl.static_range(len(pieces)):
        mass += sum_of_lines(pieces[n].to(tl.float64), LINES)
    return tl.sum(mass, 0)


@triton.jit
def rough_mass_of(pieces, LINES: tl.constexpr):
    """The same, lines in float32: off by less than `slack_of` it."""
    mass = tl.zeros([LINES], tl.float32)
    for n in tl.static_range(len(pieces)):
        mass += sum_of_lines(pieces[n], LINES)
    return tl.sum(mass.to(tl.float64), 0)


@triton.jit
def peak_of(pieces, mass, LINES: tl.constexpr):
    """A part's largest number as bits, 0 at least; above infinity where its sum is NaN."""
    top = tl.zeros([LINES], tl.float32)
    for n in tl.static_range(len(pieces)):
        top = tl.maximum(top, tl.max(tl.max(grouped(pieces[n], LINES), 2), 0))
    return tl.where(mass != mass, 0x7FFFFFFF, tl.maximum(bits_of(tl.max(top, 0)), 0))


@triton.jit
def slack_of(pieces, LINES: tl.constexpr):
    """Which part of it a sum in float32 of a line's numbers >= 0 is off by at most, and as much
    again."""
    length: tl.constexpr = len(pieces) * (pieces[0].shape[0] // LINES)
    return length * 2.0**-23


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
def ramp_to(mark):
    """How steep a ramp is that rises from 0 to 1 between the float before `mark`, as bits, and that
    one; and what makes it begin there. For numbers from 2^-100 on."""
    before = mark - 1
    steep = number_of((277 - (before >> 23)) << 23)
    return steep, -number_of(before) * steep


@triton.jit
def sums_on_ramps(x, steep, shift, LINES: tl.constexpr):
    """Of [N] the sums by line of what reaches a number, by the number's `ramp_to`."""
    # Nothing is rounded that decides, and this takes half the time of a comparison.
    return sum_of_lines(tl.clamp(x * steep + shift, 0.0, 1.0) * x, LINES)


@triton.jit
def rough_masses_of(pieces, one, two, three, four, LINES: tl.constexpr):
    """`masses_of` the numbers that are `one` .. `four` as bits, from 2^-100 on; lines are summed up
    in float32: off by less than `slack_of` them."""
    steep_one, to_one = ramp_to(one)
    steep_two, to_two = ramp_to(two)
    steep_three, to_three = ramp_to(three)
    steep_four, to_four = ramp_to(four)
    first = tl.zeros([LINES], tl.float32)
    second = tl.zeros([LINES], tl.float32)
    third = tl.zeros([LINES], tl.float32)
    fourth = tl.zeros([LINES], tl.float32)
    for n in tl.static_range(len(pieces)):
        first += sums_on_ramps(pieces[n], steep_one, to_one, LINES)
        second += sums_on_ramps(pieces[n], steep_two, to_two, LINES)
        third += sums_on_ramps(pieces[n], steep_three, to_three, LINES)
        fourth += sums_on_ramps(pieces[n], steep_four, to_four, LINES)
    return tl.reduce(
        (first.to(tl.float64), second.to(tl.float64), third.to(tl.float64), fourth.to(tl.float64)),
        0,
        added,
    )


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
def moved(low, high, at_low, at_high, mark, masses, wanted, off):
    """[low, high) after a mark, and what there is from each bound on, over and under it: from the
    mark on there is `masses`, give or take `off` of it."""
    mass = tl.sum(masses, 0)
    up = (mass * (1 - off) >= wanted) & (mark > low)
    down = (mass * (1 + off) < wanted) & (mark < high)
    at_low = tl.where(up, masses * (1 + off), at_low)
    at_high = tl.where(down, masses * (1 - off), at_high)
    return tl.where(up, mark, low), tl.where(down, mark, high), at_low, at_high


@triton.jit
def fits(low, at_low, at_high, SLOTS: tl.constexpr):
    """Whether no part has more than SLOTS numbers between bounds: all are `low` at least. Sums are
    taken to be off by more than they can."""
    most = tl.max(at_low - at_high + at_low * 1e-12, 0)
    return most <= number_of(low).to(tl.float64) * (SLOTS - 1)


@triton.jit
def step_of(
    pieces, low, high, at_low, at_high, one, two, three, four, wanted, phase, row, part, parts,
    tallies, arrivals,
    PARTS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr, ROUGH: tl.constexpr,
):  # fmt: skip
    """The bounds after a step of `bracket_of` with four marks, and the marks of the next."""
    off = 0.0
    if ROUGH:
        off = slack_of(pieces, LINES)
        first, second, third, fourth = rough_masses_of(pieces, one, two, three, four, LINES)
    else:
        first, second, third, fourth = masses_of(
            pieces, number_of(one), number_of(two), number_of(three), number_of(four), phase, LINES
        )
    at = tallies + (row * 2 + phase % 2) * 4 * parts
    tl.store(at + part, first)
    tl.store(at + parts + part, second)
    tl.store(at + 2 * parts + part, third)
    tl.store(at + 3 * parts + part, fourth)
    meet(arrivals, row, (phase + 1) * parts, PARTS, APART)
    by_one = of_parts(at, parts, 0.0, PARTS)
    by_two = of_parts(at + parts, parts, 0.0, PARTS)
    by_three = of_parts(at + 2 * parts, parts, 0.0, PARTS)
    by_four = of_parts(at + 3 * parts, parts, 0.0, PARTS)
    low, high, at_low, at_high = moved(low, high, at_low, at_high, one, by_one, wanted, off)
    low, high, at_low, at_high = moved(low, high, at_low, at_high, two, by_two, wanted, off)
    low, high, at_low, at_high = moved(low, high, at_low, at_high, three, by_three, wanted, off)
    low, high, at_low, at_high = moved(low, high, at_low, at_high, four, by_four, wanted, off)
    one, two, three, four = next_marks(low, high, tl.sum(at_low, 0), tl.sum(at_high, 0), wanted)
    return low, high, at_low, at_high, one, two, three, four


@triton.jit
def bracket_of(
    pieces, low, high, at_low, guess, spread, wanted, row, part, parts, tallies, arrivals,
    PARTS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """[low, high) as bits, with the threshold: what reaches low sums up to `wanted`, what reaches
    high does not. Either one number, or `fits`. Also how often the parts have met, once before.

    at_low: [PARTS] float64, what the parts have from `low` on, maybe more than that.
    tallies: [n, 2, 4, parts] float64: who stores into one half has seen all arrive that loaded from
    it.
    """
    # After so many steps sums in float32 are too rough to be of help, and of such numbers.
    ROUGH_STEPS: tl.constexpr = 3
    SMALL: tl.constexpr = 27 << 23
    at_high = tl.zeros([PARTS], tl.float64)
    phase = tl.full([], 1, tl.int32)
    one, two = inside(guess - 4 * spread, low, high), inside(guess - spread, low, high)
    three, four = inside(guess + spread, low, high), inside(guess + 4 * spread, low, high)
    missing = (high - low > 1) & (fits(low, at_low, at_high, SLOTS) == 0)
    while missing & (phase <= ROUGH_STEPS) & (low >= SMALL):
        low, high, at_low, at_high, one, two, three, four = step_of(
            pieces, low, high, at_low, at_high, one, two, three, four, wanted, phase, row, part,
            parts, tallies, arrivals, PARTS, APART, LINES, True,
        )  # fmt: skip
        phase += 1
        missing = (high - low > 1) & (fits(low, at_low, at_high, SLOTS) == 0)
    while missing:
        low, high, at_low, at_high, one, two, three, four = step_of(
            pieces, low, high, at_low, at_high, one, two, three, four, wanted, phase, row, part,
            parts, tallies, arrivals, PARTS, APART, LINES, False,
        )  # fmt: skip
        phase += 1
        missing = (high - low > 1) & (fits(low, at_low, at_high, SLOTS) == 0)
    return low, high, phase


@triton.jit
def hits_of(pieces, low, high, LINES: tl.constexpr):
    """Which numbers of a part's lines are in [low, high): words [LINES] int32 of BITS numbers, the
    first one in the lowest bit; how many of each line; and what the part has from `high` on,
    float64."""
    # As many bits as float32 sums up.
    BITS: tl.constexpr = 24
    EACH: tl.constexpr = pieces[0].shape[0] // LINES
    above = tl.zeros([LINES], tl.float64)
    count = tl.zeros([LINES], tl.float32)
    words = ()
    for begin in tl.static_range(0, len(pieces), BITS // EACH):
        word = tl.zeros([LINES], tl.float32)
        for n in tl.static_range(begin, min(begin + BITS // EACH, len(pieces))):
            x = pieces[n]
            beyond = x >= high
            above += sum_of_lines(tl.where(beyond, x, 0.0).to(tl.float64), LINES)
            hit = tl.where((x >= low) & (beyond == 0), 1.0, 0.0)
            count += sum_of_lines(hit, LINES)
            bit = (1 << (tl.arange(0, hit.shape[0]) % EACH)).to(tl.float32)
            word += sum_of_lines(hit * bit, LINES) * 2.0 ** ((n - begin) * EACH)
        words = words + (word.to(tl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return words, count.to(tl.int32), tl.sum(above, 0)


@triton.jit
def list_hits(
    x, words, count, numbers,
    PIECE: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the numbers that `hits_of` found in the part that begins at x, into numbers [SLOTS]
    float32, 0 behind them."""
    BITS: tl.constexpr = 24
    EACH: tl.constexpr = PIECE // LINES
    tl.store(numbers + tl.arange(0, SLOTS), tl.zeros([SLOTS], tl.float32))
    # Behind what is written above.
    tl.debug_barrier()
    line = tl.arange(0, LINES)
    place = tl.cumsum(count, 0) - count
    for _ in range(tl.max(count, 0)):
        word = tl.zeros([LINES], tl.int32)
        first = tl.zeros([LINES], tl.int32)
        left = ()
        for w in tl.static_range(len(words)):
            taken = (word == 0) & (words[w] != 0)
            word = tl.where(taken, words[w], word)
            first = tl.where(taken, w * BITS, first)
            rest = tl.where(taken, words[w] & (words[w] - 1), words[w])
            left = left + (rest,)  # type: ignore[assignment]  # noqa: RUF005
        words = left
        lowest = (word & -word).to(tl.float32)
        number = first + (bits_of(lowest) >> 23) - 127
        at = number // EACH * PIECE + line * EACH + number % EACH
        live = (word != 0) & (place < SLOTS)
        value = tl.load(x + at, mask=live, other=0.0)
        tl.store(numbers + place, value, mask=live)
        place += (word != 0).to(tl.int32)


@triton.jit
def nucleus_of(
    pieces, share, wanted, peak_key, width, row, part, parts, masses, sizes, tallies, arrivals,
    PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """`bracket_of` a row; nothing, from 0 to 0, if it keeps all."""
    low, high, phase = peak_key * 0, peak_key * 0, tl.full([], 1, tl.int32)
    at_low = of_parts(masses + row * parts, parts, 0.0, PARTS) * (1 + slack_of(pieces, LINES))
    total = tl.sum(at_low, 0)
    if (share < 1.0) & (total >= wanted):
        guess, spread = guess_of(
            sizes + row * parts * BINS, (total - wanted).to(tl.float32), parts, len(pieces), PARTS,
            BINS,
        )  # fmt: skip
        # All below sum up to half of what is surely not wanted.
        spare = tl.maximum(total * (1 - 2 * slack_of(pieces, LINES)) - wanted, 0.0)
        low = tl.minimum(tl.maximum(bits_of((spare * 0.5 / width).to(tl.float32)), 1), peak_key)
        low, high, phase = bracket_of(
            pieces, low, peak_key + 1, at_low, guess, spread, wanted,
            row, part, parts, tallies, arrivals, PARTS, APART, LINES, SLOTS,
        )  # fmt: skip
    return low, high, phase


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
def narrowed(low, high, mass_low, mass_high, mark, mass, wanted):
    """[low, high) after a mark that `mass` reaches, and what reaches each bound."""
    up, down = (mass >= wanted) & (mark > low), (mass < wanted) & (mark < high)
    mass_low, mass_high = tl.where(up, mass, mass_low), tl.where(down, mass, mass_high)
    return tl.where(up, mark, low), tl.where(down, mark, high), mass_low, mass_high


@triton.jit
def search_lists(listed, low, high, wanted, LINES: tl.constexpr):
    """[low, high) with one float, or with one of the listed numbers, where their sum gets to what
    is wanted. All reach low, none high."""
    mass_low = mass_of(listed, LINES)
    mass_high = tl.full([], 0.0, tl.float64)
    # Two numbers were twice as much as low, and there are too few to be off by half of it.
    while (high - low > 1) & (mass_low - mass_high > 1.5 * number_of(low).to(tl.float64)):
        one, two, three, four = next_marks(low, high, mass_low, mass_high, wanted)
        first, second, third, fourth = masses_of(
            listed, number_of(one), number_of(two), number_of(three), number_of(four), low, LINES
        )
        low, high, mass_low, mass_high = narrowed(
            low, high, mass_low, mass_high, one, first, wanted
        )
        low, high, mass_low, mass_high = narrowed(
            low, high, mass_low, mass_high, two, second, wanted
        )
        low, high, mass_low, mass_high = narrowed(
            low, high, mass_low, mass_high, three, third, wanted
        )
        low, high, mass_low, mass_high = narrowed(
            low, high, mass_low, mass_high, four, fourth, wanted
        )
    return low, high


@triton.jit
def kept_by_parts(
    low, high, wanted, row, parts, aboves, counts, numbers,
    PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The least number that a row keeps; of each part the sum of what is kept, [PARTS] float64, and
    how many numbers equal to the least are, the first ones, [PARTS] int32: -1 if all are.

    aboves, counts: what `hits_of` gave.
    """
    above = of_parts(aboves + row * parts, parts, 0.0, PARTS)
    equals = of_parts(counts + row * parts, parts, 0, PARTS)
    if high - low > 1:
        numbers += row * parts * SLOTS
        listed = load_lists(numbers, parts, PARTS, LINES, SLOTS)
        low, high = search_lists(listed, low, high, wanted - tl.sum(above, 0), LINES)
        p = tl.arange(0, PARTS)[:, None]
        at = numbers + p * SLOTS + tl.arange(0, SLOTS)[None, :]
        value = tl.load(at, mask=p < parts, other=0.0, cache_modifier=".cg")
        above += tl.sum(tl.where(value > number_of(low), value, 0.0).to(tl.float64), 1)
        equals = tl.sum((value == number_of(low)).to(tl.int32), 1)
    least = number_of(low)
    weight = least.to(tl.float64)
    # Equal ones: kept one after the other while the sum before is less than wanted.
    room = tl.math.ceil((wanted - tl.sum(above, 0)) / tl.maximum(weight, 1e-300))
    room = tl.minimum(tl.maximum(room, 0.0), 1073741824.0).to(tl.int32)
    before = tl.cumsum(equals, 0) - equals
    taken = tl.minimum(tl.maximum(room - before, 0), equals)
    return least, above + taken.to(tl.float64) * weight, tl.where(taken < equals, taken, -1)


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
def draw_of_part(
    x, row, part, stride, width, least, few, target,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where in its row a part's running sum of what is kept first exceeds the target; few: as of
    `kept_by_parts`."""
    pieces = load_part(x, row, part, stride, width, 0.0, PART, PIECE, ALIGN)
    _, begin = part_at(row * stride, part, PART, ALIGN)
    chosen = tl.zeros([PIECE], tl.float64)
    start, running = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    place = begin
    found = tl.full([], False, tl.int1)
    for n in tl.static_range(len(pieces)):
        kept = pieces[n] >= least
        if few >= 0:
            equal = (pieces[n] == least).to(tl.int32)
            kept = kept & ((equal == 0) | (tl.cumsum(equal, 0) <= few))
            few = tl.maximum(few - tl.sum(equal, 0), 0)
        weight = tl.where(kept, pieces[n], 0.0).to(tl.float64)
        mass = tl.sum(weight, 0)
        # The first that goes beyond, or else the last that has anything.
        better = (found == 0) & (mass > 0.0)
        chosen = tl.where(better, weight, chosen)
        start = tl.where(better, running, start)
        place = tl.where(better, begin + n * PIECE, place)
        found = found | (better & (running + mass > target))
        running += mass
    return first_beyond(chosen, target - start, place + tl.arange(0, PIECE))


@triton.jit
def draw_of_row(
    x, row, stride, width, least, kept, first_few, part_of_sum,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The first number of a row at which the running sum of what `kept_by_parts` found exceeds as
    much of all of it; -1 if that is no number > 0."""
    p = tl.arange(0, PARTS)
    total = tl.sum(kept, 0)
    target = part_of_sum.to(tl.float64) * total
    best = first_beyond(kept, target, p)
    few = tl.sum(tl.where(p == best, first_few, 0), 0)
    target -= tl.sum(tl.where(p < best, kept, 0.0), 0)
    token = draw_of_part(x, row, best, stride, width, least, few, target, PART, PIECE, ALIGN)
    return tl.where(total > 0.0, token, -1)


@triton.jit
def top_p_kernel(
    x, top_p, uniform, out, tickets, arrivals, peaks, masses, sizes, tallies, numbers, aboves,
    counts, stride, width, parts, places,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    SLOTS: tl.constexpr, BINS: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x where it is in the nucleus of its row, divided by the sum of that; else 0.
    With uniform [n] float32: out [n] int32 is the first number of the nucleus whose running sum
    exceeds as much of its sum; -1 if that is no number > 0.

    Written: peaks [n, parts] int32, masses [n, parts] float64, and sizes [n, parts, BINS] int32 of
    some numbers of each part; tallies [n, 2, 4, parts] float64; numbers [n, parts, SLOTS] float32,
    the lists, with aboves [n, parts] float64 and counts [n, parts] int32.
    """
    row, part = seat_of(tickets, parts, places, LATE)
    share = tl.load(top_p + row)
    pieces = load_part(x, row, part, stride, width, 0.0, PART, PIECE, ALIGN)
    own_mass = rough_mass_of(pieces, LINES)
    tl.store(peaks + row * parts + part, peak_of(pieces, own_mass, LINES))
    tl.store(masses + row * parts + part, own_mass)
    tl.store(sizes + (row * parts + part) * BINS + tl.arange(0, BINS), sizes_of(pieces, BINS))
    meet(arrivals, row, parts, PARTS, APART)
    peak_key = tl.max(of_parts(peaks + row * parts, parts, 0, PARTS), 0)
    # The largest is kept whatever the share.
    wanted = tl.maximum(share.to(tl.float64), 1e-300)
    threshold = 0.0
    total = odd_total(peak_key)
    few = tl.full([], -1, tl.int32)
    if peak_key < 0x7F800000:
        low, high, phase = nucleus_of(
            pieces, share, wanted, peak_key, width, row, part, parts, masses, sizes, tallies,
            arrivals, PARTS, LINES, SLOTS, BINS, APART,
        )  # fmt: skip
        words, count, above = hits_of(pieces, number_of(low), number_of(high), LINES)
        tl.store(aboves + row * parts + part, above)
        tl.store(counts + row * parts + part, tl.sum(count, 0))
        if high - low > 1:
            at, _ = part_at(row * stride, part, PART, ALIGN)
            list_hits(
                x + at, words, count, numbers + (row * parts + part) * SLOTS, PIECE, LINES, SLOTS
            )
        if uniform is None:
            meet(arrivals, row, (phase + 1) * parts, PARTS, APART)
            least, kept, first_few = kept_by_parts(
                low, high, wanted, row, parts, aboves, counts, numbers, PARTS, LINES, SLOTS
            )
            threshold = least
            total = tl.maximum(tl.sum(kept, 0).to(tl.float32), 1.1754943508222875e-38)
            few = tl.sum(tl.where(tl.arange(0, PARTS) == part, first_few, 0), 0)
        elif last_to_come(arrivals, row, (phase + 1) * parts, PARTS, APART):
            least, kept, first_few = kept_by_parts(
                low, high, wanted, row, parts, aboves, counts, numbers, PARTS, LINES, SLOTS
            )
            token = draw_of_row(
                x, row, stride, width, least, kept, first_few, tl.load(uniform + row),
                PARTS, PART, PIECE, ALIGN,
            )  # fmt: skip
            tl.store(out + row, token)
    elif uniform is not None:
        tl.store(out + row, -1)
    if uniform is None:
        if few < 0:
            store_shares(out, row, part, width, pieces, threshold, total, PART, PIECE, ALIGN)
        else:
            store_first(out, row, part, width, pieces, threshold, few, total, PART, PIECE, ALIGN)
