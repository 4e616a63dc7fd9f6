"""The nucleus of a row, by a team: see `teams`.

Where its threshold lies is guessed from how large some numbers of each part are, all others being
like them. The team sums up what reaches a few numbers around the guess, and goes on from what that
tells (see `bracket`), until each part can list its numbers that are still in question: one step,
mostly. All lists together are searched by every program, or, where a token is drawn, by the last
that comes alone.

Sums that only lead there are of float32, and tell no more than they can; those that decide are of
float64, in an order that the split of the row gives.
"""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.bracket import (
    mass_of,
    masses_of,
    next_marks,
    nucleus_of,
    peak_of,
    rough_mass_of,
    sizes_of,
)
from cairn.ops.sampling.kernels.filters import bits_of, first_beyond
from cairn.ops.sampling.kernels.held import load_part, store_piece, store_shares, sum_of_lines
from cairn.ops.sampling.kernels.teams import (
    last_to_come,
    leave,
    load_inside,
    meet,
    number_of,
    odd_total,
    of_parts,
    part_at,
    seat_of,
)
from cairn.ops.sampling.kernels.tuples import with_one_more


@triton.jit
def quarters(x, LINES: tl.constexpr):
    """A piece as 4 tensors [LINES]: the first numbers of its lines, and so on."""
    even, odd = tl.split(tl.permute(tl.reshape(x, [LINES, 2, 2]), (0, 2, 1)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def is_between(x, low, high):
    """Which numbers are in [low, high), as bits: 1 or 0."""
    span = (high - low).to(tl.uint32, bitcast=True)
    return tl.where((bits_of(x) - low).to(tl.uint32, bitcast=True) < span, 1, 0)


@triton.jit
def list_part(pieces, low, high, numbers, LINES: tl.constexpr, SLOTS: tl.constexpr):
    """Write a part's numbers in [low, high), as bits, into numbers [SLOTS] float32, 0 behind them,
    if that is long enough. How many there are, and what the part has from `high` on, float64."""
    above = tl.zeros([LINES], tl.float64)
    count = tl.zeros([LINES], tl.int32)
    for n in tl.static_range(len(pieces)):
        larger = tl.where(pieces[n] >= number_of(high), pieces[n], 0.0)
        above += sum_of_lines(larger.to(tl.float64), LINES)
        count += sum_of_lines(is_between(pieces[n], low, high), LINES)
    running = tl.cumsum(count, 0)
    found = tl.max(running, 0)
    if found <= SLOTS:
        # Not known to be what it was: else what is between would be held from there to here.
        low += found >> 31
        at = numbers + running - count
        for n in tl.static_range(len(pieces)):
            each = quarters(pieces[n], LINES)
            for k in tl.static_range(4):
                hit = is_between(each[k], low, high)
                tl.store(at, each[k], mask=hit > 0)
                at += hit
        i = tl.arange(0, SLOTS)
        tl.store(numbers + i, tl.zeros([SLOTS], tl.float32), mask=i >= found)
    return found, tl.sum(above, 0)


@triton.jit
def load_lists(
    numbers, parts,
    PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """The lists of a row's parts in pieces, 0 behind them: of SLOTS numbers, USED at most."""
    PIECE: tl.constexpr = 4 * LINES
    listed = ()
    for begin in tl.static_range(0, PARTS * USED, PIECE):
        i = begin + tl.arange(0, PIECE)
        at = numbers + i // USED * SLOTS + i % USED
        piece = tl.load(at, mask=i < parts * USED, other=0.0, cache_modifier=".cg")
        listed = with_one_more(listed, piece)
    return listed


@triton.jit
def narrowed(low, high, mass_low, mass_high, mark, mass, wanted):
    """[low, high) after a mark that `mass` reaches, and what reaches each bound."""
    up, down = (mass >= wanted) & (mark > low), (mass < wanted) & (mark < high)
    mass_low, mass_high = tl.where(up, mass, mass_low), tl.where(down, mass, mass_high)
    return tl.where(up, mark, low), tl.where(down, mark, high), mass_low, mass_high


@triton.jit
def search_listed(listed, low, high, mass_low, wanted, LINES: tl.constexpr):
    """[low, high) with one float, or with one of the listed numbers, where their sum gets to what
    is wanted; and what is listed from each of them on. All reach low, and are mass_low; none
    reaches high."""
    mass_high = tl.full([], 0.0, tl.float64)
    # Two numbers were twice as much as low, and there are too few to be off by half of it.
    while (high - low > 1) & (mass_low - mass_high > 1.5 * number_of(low).to(tl.float64)):
        marks = next_marks(low, high, mass_low, mass_high, wanted)
        masses = masses_of(
            listed, number_of(marks[0]), number_of(marks[1]), number_of(marks[2]),
            number_of(marks[3]), low, LINES,
        )  # fmt: skip
        for n in tl.static_range(4):
            low, high, mass_low, mass_high = narrowed(
                low, high, mass_low, mass_high, marks[n], masses[n], wanted
            )
    return low, high, mass_low, mass_high


@triton.jit
def search_lists(
    numbers, parts, low, high, wanted,
    PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """`search_listed` for lists of which USED numbers are used at most."""
    listed = load_lists(numbers, parts, PARTS, LINES, SLOTS, USED)
    return search_listed(listed, low, high, mass_of(listed, LINES), wanted, LINES)


@triton.jit
def searched(
    low, high, wanted, row, parts, aboves, counts, numbers,
    PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """[low, high) of `search_lists`, or as it is without lists; what the row has between, and what
    from `high` on, float64. aboves, counts: what `list_part` gave."""
    beyond = tl.sum(of_parts(aboves + row * parts, parts, 0.0, PARTS), 0)
    count = of_parts(counts + row * parts, parts, 0, PARTS)
    mass_low = tl.sum(count, 0).to(tl.float64) * number_of(low).to(tl.float64)
    mass_high = tl.full([], 0.0, tl.float64)
    if high - low > 1:
        numbers += row * parts * SLOTS
        # Mostly they are half full at most.
        HALF: tl.constexpr = SLOTS // 2
        if tl.max(count, 0) <= HALF:
            low, high, mass_low, mass_high = search_lists(
                numbers, parts, low, high, wanted - beyond, PARTS, LINES, SLOTS, HALF
            )
        else:
            low, high, mass_low, mass_high = search_lists(
                numbers, parts, low, high, wanted - beyond, PARTS, LINES, SLOTS, SLOTS
            )
    # Not from sums that have both: what is between may be less than they can tell.
    return low, high, mass_low - mass_high, beyond + mass_high


@triton.jit
def taken_of(least, equals, above, wanted):
    """How many of a row's `equals` numbers `least` are kept, one after the other while the sum
    before is less than wanted; above: what is larger than they are."""
    room = tl.math.ceil((wanted - above) / tl.maximum(least.to(tl.float64), 1e-300))
    return tl.minimum(tl.minimum(tl.maximum(room, 0.0), 1073741824.0).to(tl.int32), equals)


@triton.jit
def kept_by_parts(
    least, listed, wanted, row, parts, aboves, counts, numbers,
    PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Of each part the sum of what a row keeps from `least` on, [PARTS] float64, and how many
    numbers equal to that are kept, the first ones, [PARTS] int32: -1 if all are. listed: whether
    there are lists, else all that `list_part` counted are equal."""
    above = of_parts(aboves + row * parts, parts, 0.0, PARTS)
    equals = of_parts(counts + row * parts, parts, 0, PARTS)
    if listed:
        p = tl.arange(0, PARTS)[:, None]
        at = numbers + (row * parts + p) * SLOTS + tl.arange(0, SLOTS)[None, :]
        value = tl.load(at, mask=p < parts, other=0.0, cache_modifier=".cg")
        above += tl.sum(tl.where(value > least, value, 0.0).to(tl.float64), 1)
        equals = tl.sum((value == least).to(tl.int32), 1)
    return kept_of_parts(least, above, equals, wanted)


@triton.jit
def kept_of_parts(least, above, equals, wanted):
    """`kept_by_parts` of what the parts have above the least number, and how many equal to it."""
    room = taken_of(least, tl.sum(equals, 0), tl.sum(above, 0), wanted)
    before = tl.cumsum(equals, 0) - equals
    taken = tl.minimum(tl.maximum(room - before, 0), equals)
    kept = above + taken.to(tl.float64) * least.to(tl.float64)
    return kept, tl.where(taken < equals, taken, -1)


@triton.jit
def kept_of_row(
    low, high, wanted, row, part, parts, aboves, counts, numbers,
    PARTS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The least number that a row keeps, the sum of all, float64, and how many numbers equal to the
    least a part keeps, the first ones: -1 if all. aboves, counts: what `list_part` gave."""
    listed = high - low > 1
    low, high, between, above = searched(
        low, high, wanted, row, parts, aboves, counts, numbers, PARTS, LINES, SLOTS
    )
    least = number_of(low)
    total = above + between
    few = tl.full([], -1, tl.int32)
    if high - low == 1:
        weight = tl.maximum(least.to(tl.float64), 1e-300)
        equals = (between / weight + 0.5).to(tl.int32)
        taken = taken_of(least, equals, above, wanted)
        total = above + taken.to(tl.float64) * least.to(tl.float64)
        if taken < equals:
            _, first = kept_by_parts(
                least, listed, wanted, row, parts, aboves, counts, numbers, PARTS, SLOTS
            )
            few = tl.sum(tl.where(tl.arange(0, PARTS) == part, first, 0), 0)
    return least, total, few


@triton.jit
def store_first(
    x, out, row, part, stride, width, least, few, total,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """`store_shares` that keeps but the first few of the part's numbers that are equal to `least`.

    It is rare: the part is read again, so that the code is not there for every piece."""
    at, begin = part_at(row * stride, part, PART, ALIGN)
    into, _ = part_at(row * width, part, PART, ALIGN)
    i = tl.arange(0, PIECE)
    for n in range(0, PART, PIECE):
        value = load_inside(x + at + n, i, begin + n, width, 0.0, PIECE, False)
        equal = (value == least).to(tl.int32)
        kept = (value > least) | ((equal > 0) & (tl.cumsum(equal, 0) <= few))
        few -= tl.sum(equal, 0)
        store_piece(out + into + n, begin + n, width, tl.where(kept, value, 0.0) / total)


@triton.jit
def draw_of_part(
    x, row, part, stride, width, least, few, target,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where in its row a part's running sum of what is kept first exceeds the target; few: as of
    `kept_by_parts`."""
    pieces = load_part(x, row, part, stride, width, PART, PIECE, ALIGN)
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
def nucleus_of_part(
    x, top_p, uniform, out, arrivals, peaks, masses, sizes, tallies, numbers, aboves, counts,
    stride, width, row, part, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    SLOTS: tl.constexpr, BINS: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """`top_p_kernel` for a part of a row."""
    share = tl.load(top_p + row)
    pieces = load_part(x, row, part, stride, width, PART, PIECE, ALIGN)
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
        at = row * parts + part
        count, above = list_part(pieces, low, high, numbers + at * SLOTS, LINES, SLOTS)
        tl.store(aboves + at, above)
        tl.store(counts + at, count)
        if uniform is None:
            meet(arrivals, row, (phase + 1) * parts, PARTS, APART)
            threshold, kept, few = kept_of_row(
                low, high, wanted, row, part, parts, aboves, counts, numbers, PARTS, LINES, SLOTS
            )
            total = tl.maximum(kept.to(tl.float32), 1.1754943508222875e-38)
        elif last_to_come(arrivals, row, (phase + 1) * parts, PARTS, APART):
            listed = high - low > 1
            low, _, _, _ = searched(
                low, high, wanted, row, parts, aboves, counts, numbers, PARTS, LINES, SLOTS
            )
            least = number_of(low)
            kept, first_few = kept_by_parts(
                least, listed, wanted, row, parts, aboves, counts, numbers, PARTS, SLOTS
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
            store_first(
                x, out, row, part, stride, width, threshold, few, total, PART, PIECE, ALIGN
            )  # fmt: skip
    leave(arrivals, row, parts, PARTS, APART)


@triton.jit(do_not_specialize=["programs"])
def top_p_kernel(
    x, top_p, uniform, out, tickets, arrivals, peaks, masses, sizes, tallies, numbers, aboves,
    counts, verdicts, left_open, stride, width, programs, parts, places,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    SLOTS: tl.constexpr, BINS: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
    LATE: tl.constexpr, ABREAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x where it is in the nucleus of its row, divided by the sum of that; else 0.
    With uniform [n] float32: out [n] int32 is the first number of the nucleus whose running sum
    exceeds as much of its sum; -1 if that is no number > 0. With verdicts and left_open, which
    `settle_kernel` of `passes` wrote: of those rows only that it left open.

    Written: peaks [n, parts] int32, masses [n, parts] float64, and sizes [n, parts, BINS] int32 of
    some numbers of each part; tallies [n, 2, 4, parts] float64; numbers [n, parts, SLOTS] float32,
    the lists, with aboves [n, parts] float64 and counts [n, parts] int32.
    """
    await_previous(EARLY)
    wanted = programs > 0
    if left_open is not None:
        wanted = tl.load(left_open) > 0
    if wanted:
        row, part = seat_of(tickets, programs, parts, places, LATE, ABREAST)
        if left_open is not None:
            wanted = tl.load(verdicts + row * 4) == 0
        if wanted:
            nucleus_of_part(
                x, top_p, uniform, out, arrivals, peaks, masses, sizes, tallies, numbers, aboves,
                counts, stride, width, row, part, parts,
                PARTS, PART, PIECE, LINES, SLOTS, BINS, APART, ALIGN,
            )  # fmt: skip
