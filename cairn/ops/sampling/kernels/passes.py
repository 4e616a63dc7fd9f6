"""The nucleus of a row by passes over it, each a launch, of which none waits inside.

The first guesses between which numbers the threshold lies, see `guess`; the second lists what a row
has between, and sums up what it has above, part by part; the third finds the threshold among what
is listed, and draws, or the fourth stores. A pass reads what it can before it waits for the one in
front. Where the guess was wrong, the row is left to a team, see `nucleus`.

Sums are of float64, in an order that the split of the row gives.
"""

from __future__ import annotations

from cairn.ops.early import ask_for, await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import bits_of
from cairn.ops.sampling.kernels.held import load_part, load_pieces, store_shares
from cairn.ops.sampling.kernels.nucleus import (
    draw_of_row,
    is_between,
    kept_of_parts,
    search_listed,
    store_first,
    taken_of,
)
from cairn.ops.sampling.kernels.teams import number_of, odd_total, part_at
from cairn.ops.sampling.kernels.tuples import with_one_more


@triton.jit
def ones_of(bits):
    """How many bits of each uint32 are 1."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def place_of(bit):
    """Which bit of a uint32 is the one that is 1."""
    return (bits_of(bit.to(tl.float32)) >> 23) - 127


@triton.jit
def survey_lines(pieces, low, high, LINES: tl.constexpr):
    """Of lines of up to 32 numbers, [LINES] each: which are in [low, high), a bit for each number;
    what they have from `high` on, float64; and their sums, rough, and largest."""
    hits = tl.zeros([LINES], tl.uint32)
    above = tl.zeros([LINES], tl.float64)
    mass = tl.zeros([LINES], tl.float32)
    top = tl.zeros([LINES], tl.float32)
    k = tl.arange(0, 4)[None, :].to(tl.uint32)
    for n in tl.static_range(len(pieces)):
        value = tl.reshape(pieces[n], [LINES, 4])
        larger = tl.where(value >= number_of(high), value, 0.0)
        above += tl.sum(larger.to(tl.float64), 1)
        hit = is_between(value, low, high).to(tl.uint32)
        hits += tl.sum(hit << (k + 4 * n), 1)
        mass += tl.sum(value, 1)
        top = tl.maximum(top, tl.max(value, 1))
    return hits, above, mass, top


@triton.jit
def list_kernel(
    x, bounds, peaks, aboves, amongs, counts, numbers, stride, width, parts,
    PART: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of each part of a row its numbers in `bounds`, as bits: numbers [n, parts, SLOTS] float32, 0
    behind them, if there are no more; amongs, their sum, and aboves, the sum of what is larger,
    [n, parts] float64; counts, how many they are, and peaks, the largest number as bits, above
    infinity where there is NaN, [n, parts] int32."""
    PIECE: tl.constexpr = 4 * LINES
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    at, begin = part_at(row * stride, part, PART, ALIGN)
    line = tl.arange(0, LINES)
    if EARLY:
        # On their way before it is known what is asked of them.
        near = tl.minimum(tl.maximum(begin + line * (BLOCK // LINES), 0), width - 1)
        ask_for(x + at - begin + near)
    await_previous(EARLY)
    low, high = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    numbers += (row * parts + part) * SLOTS
    found = tl.full([], 0, tl.int32)
    above, among = tl.zeros([LINES], tl.float64), tl.zeros([LINES], tl.float64)
    mass, top = tl.zeros([LINES], tl.float32), tl.zeros([LINES], tl.float32)
    for n in range(0, PART, BLOCK):
        if (begin + n >= 0) & (begin + n + BLOCK <= width):
            pieces = load_pieces(x + at + n, begin + n, width, BLOCK, PIECE, True)
        else:
            pieces = load_pieces(x + at + n, begin + n, width, BLOCK, PIECE, False)
        hits, more, own, own_top = survey_lines(pieces, low, high, LINES)
        above += more
        mass += own
        top = tl.maximum(top, own_top)
        count = ones_of(hits)
        running = tl.cumsum(count, 0)
        several = tl.max(running, 0)
        if found + several <= SLOTS:
            to = numbers + found + running - count
            for _ in range(tl.max(count, 0)):
                rest = hits & (hits - 1)
                place = place_of(hits ^ rest)
                some = hits > 0
                i = n + (place >> 2) * PIECE + line * 4 + (place & 3)
                value = tl.load(x + at + i, mask=some, other=0.0)
                tl.store(to, value, mask=some)
                among += value.to(tl.float64)
                to += 1
                hits = rest
        found += several
    for n in tl.static_range(0, SLOTS, LINES):
        i = n + line
        tl.store(numbers + i, tl.zeros([LINES], tl.float32), mask=(i >= found) & (i < SLOTS))
    at = row * parts + part
    total = tl.sum(mass, 0)
    peak = tl.maximum(bits_of(tl.max(top, 0)), 0)
    tl.store(peaks + at, tl.where(total != total, 0x7FFFFFFF, peak))
    tl.store(aboves + at, tl.sum(above, 0))
    tl.store(amongs + at, tl.sum(among, 0))
    tl.store(counts + at, found)


@triton.jit
def load_lists(numbers, listed, LINES: tl.constexpr, LISTED: tl.constexpr):
    """The first numbers of a row's lists in pieces, LISTED or fewer, 0 behind them."""
    PIECE: tl.constexpr = 4 * LINES
    pieces = ()
    for begin in tl.static_range(0, LISTED, PIECE):
        i = begin + tl.arange(0, PIECE)
        pieces = with_one_more(pieces, tl.load(numbers + i, mask=i < listed, other=0.0))
    return pieces


@triton.jit
def kept_by_lists(least, wanted, above, numbers, parts, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    """`kept_by_parts` of a row whose parts have `above` [PARTS] beside their lists."""
    equals = tl.zeros([PARTS], tl.int32)
    p = tl.arange(0, PARTS)[:, None]
    for begin in tl.static_range(0, SLOTS, 64):
        i = begin + tl.arange(0, 64)[None, :]
        value = tl.load(numbers + p * SLOTS + i, mask=(p < parts) & (i < SLOTS), other=0.0)
        above += tl.sum(tl.where(value > least, value, 0.0).to(tl.float64), 1)
        equals += tl.sum((value == least).to(tl.int32), 1)
    return kept_of_parts(least, above, equals, wanted)


@triton.jit
def settle_kernel(
    x, top_p, uniform, out, bounds, peaks, aboves, amongs, counts, numbers, firsts, verdicts,
    left_open, stride, width, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    SLOTS: tl.constexpr, LISTED: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """verdicts [n, 4] int32: 1 if it is known what a row keeps; then the least number that it keeps
    and the sum of all, float32, as bits, and 1 if some parts keep but the first of their numbers
    equal to the least: then firsts [n, parts] int32 says how many, -1 for all. left_open [1] int32:
    of how many rows it is not known.

    With uniform [n] float32: out [n] int32 is the token instead. The rest is of `list_kernel`.
    """
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    numbers += row * parts * SLOTS
    # All at once: none waits for another.
    pieces = load_lists(numbers, parts * SLOTS, LINES, LISTED)
    share = tl.load(top_p + row)
    low, high = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    p = tl.arange(0, PARTS)
    at, own = row * parts + p, p < parts
    peak_key = tl.max(tl.load(peaks + at, mask=own, other=0), 0)
    above = tl.load(aboves + at, mask=own, other=0.0)
    among = tl.sum(tl.load(amongs + at, mask=own, other=0.0), 0)
    count = tl.load(counts + at, mask=own, other=0)
    # The largest is kept whatever the share.
    wanted = tl.maximum(share.to(tl.float64), 1e-300)
    beyond = tl.sum(above, 0)
    finite = peak_key < 0x7F800000
    right = (beyond < wanted) & (beyond + among >= wanted) & (tl.max(count, 0) <= SLOTS)
    settled = right | (share >= 1.0) | (finite == 0)
    verdicts += row * 4
    tl.store(verdicts, settled.to(tl.int32))
    if settled:
        # A row that is not finite keeps all.
        low, high = tl.where(finite, low, 0), tl.where(finite, tl.minimum(high, peak_key + 1), 0)
        low, high, from_low, from_high = search_listed(
            pieces, low, high, among, wanted - beyond, LINES
        )
        least = number_of(low)
        if uniform is not None:
            token = tl.full([], -1, tl.int32)
            if finite:
                kept, first = kept_by_lists(least, wanted, above, numbers, parts, PARTS, SLOTS)
                token = draw_of_row(
                    x, row, stride, width, least, kept, first, tl.load(uniform + row),
                    PARTS, PART, PIECE, ALIGN,
                )  # fmt: skip
            tl.store(out + row, token)
        else:
            # Not from sums that have both: what is between may be less than they can tell.
            between, larger = from_low - from_high, beyond + from_high
            total = larger + between
            partly = tl.full([], 0, tl.int32)
            if (high - low == 1) & finite:
                weight = tl.maximum(least.to(tl.float64), 1e-300)
                equals = (between / weight + 0.5).to(tl.int32)
                taken = taken_of(least, equals, larger, wanted)
                total = larger + taken.to(tl.float64) * least.to(tl.float64)
                if taken < equals:
                    partly += 1
                    _kept, first = kept_by_lists(least, wanted, above, numbers, parts, PARTS, SLOTS)
                    tl.store(firsts + at, first, mask=own)
            divisor = tl.maximum(total.to(tl.float32), 1.1754943508222875e-38)
            divisor = tl.where(finite, divisor, odd_total(peak_key))
            tl.store(verdicts + 1, low)
            tl.store(verdicts + 2, bits_of(divisor))
            tl.store(verdicts + 3, partly)
    else:
        tl.atomic_add(left_open, 1, sem="relaxed")


@triton.jit
def store_kernel(
    x, out, firsts, verdicts, stride, width, parts, programs,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n, width] = what rows of x keep, divided by the sum of that, else 0; of rows it is known
    of, by `settle_kernel`."""
    # What was read last may still be in the cache.
    number = programs - 1 - tl.program_id(0)
    row, part = (number // parts).to(tl.int64), number % parts
    pieces = load_part(x, row, part, stride, width, PART, PIECE, ALIGN)
    await_previous(EARLY)
    verdicts += row * 4
    if tl.load(verdicts) != 0:
        least = number_of(tl.load(verdicts + 1))
        total = number_of(tl.load(verdicts + 2))
        few = tl.load(firsts + row * parts + part, mask=tl.load(verdicts + 3) != 0, other=-1)
        if few < 0:
            store_shares(out, row, part, width, pieces, least, total, PART, PIECE, ALIGN)
        else:
            store_first(x, out, row, part, stride, width, least, few, total, PART, PIECE, ALIGN)
