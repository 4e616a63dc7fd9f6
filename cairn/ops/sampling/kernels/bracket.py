"""Between which numbers the threshold of a nucleus lies, by a team: see `nucleus`."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import added, bits_of
from cairn.ops.sampling.kernels.held import grouped, sum_of_lines
from cairn.ops.sampling.kernels.teams import (
    meet,
    number_of,
    of_parts,
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
    # Two loops: in one that has both kinds of sums, a part no longer fits the registers.
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
