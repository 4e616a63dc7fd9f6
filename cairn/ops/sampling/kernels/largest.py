"""The k largest of a row, by a team: see `teams`.

Each part lists its numbers from a bound on that the largest maxima of its lines tell, its own or
those of all parts. All lists together hold the row's k largest; every program searches them. Where
lists are too long, or k is more than there are lines, the team counts what its registers hold, step
by step.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import filters_of, ordered
from cairn.ops.sampling.kernels.teams import (
    columns,
    fetch_later,
    leave,
    load_part,
    meet,
    nan_in_lines,
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
    total_of,
    total_of_parts,
    whole_sums,
)


@triton.jit
def kth_of(top, k):
    """The k-th largest of [N]: the least of those that fewer than k are larger than."""
    larger = tl.sum((top[:, None] > top[None, :]).to(tl.int32), 0)
    return tl.min(tl.where(larger < k, top, float("inf")), 0)


@triton.jit
def list_part(
    pieces, bound, numbers, LOWEST: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr
):
    """Write the numbers that reach the bound, or are NaN, into numbers [SLOTS] float32, LOWEST
    behind them; and return how many they are: nothing holds if more than SLOTS."""
    tl.store(numbers + tl.arange(0, SLOTS), tl.full([SLOTS], LOWEST, tl.float32))
    each = tl.zeros([LINES], tl.int32)
    for n in tl.static_range(len(pieces)):
        tile = columns(pieces[n], LINES)
        each += tl.sum(((tile < bound) == 0).to(tl.int32), 0)
    count = tl.sum(each, 0)
    if count <= SLOTS:
        # Behind what is written above.
        tl.debug_barrier()
        before = tl.cumsum(each, 0) - each
        # The same number, but not the same comparisons: they would be kept from above.
        bound += 0.0
        for n in tl.static_range(len(pieces)):
            tile = columns(pieces[n], LINES)
            hit = ((tile < bound) == 0).to(tl.int32)
            place = before[None, :] + tl.cumsum(hit, 0) - 1
            # Stores want rows.
            tl.store(numbers + tl.trans(place), tl.trans(tile), mask=tl.trans(hit) > 0)
            before += tl.sum(hit, 0)
    return count


@triton.jit
def trials_of(low, high):
    """Three numbers in (low, high), int64, high - low > 1."""
    step = tl.maximum((high - low) >> 2, 1)
    one = low + step
    two = tl.minimum(one + step, high - 1)
    return one, two, tl.minimum(two + step, high - 1)


@triton.jit
def narrowed(low, high, at_low, one, two, three, counts, k):
    """[low, high), and how many reach low, after a step: counts holds, 20 bits each, how many
    reach each of the trials."""
    n_one, n_two, n_three = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
    by_one, by_two, by_three = n_one >= k, n_two >= k, n_three >= k
    high = tl.where(by_three, high, tl.where(by_two, three, tl.where(by_one, two, one)))
    low = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
    at_low = tl.where(by_three, n_three, tl.where(by_two, n_two, tl.where(by_one, n_one, at_low)))
    return low, high, at_low


@triton.jit
def packed(one, two, three, LINES: tl.constexpr):
    """Of booleans [N], three counts of each line [LINES], 10 bits each."""
    reach = one.to(tl.int32) + (two.to(tl.int32) << 10) + (three.to(tl.int32) << 20)
    return sum_of_lines(reach, LINES)


@triton.jit
def counted(reach):
    """Three counts in one int64, 20 bits each, from those of lines."""
    wide = (reach & 0x3FF).to(tl.int64) + (((reach >> 10) & 0x3FF).to(tl.int64) << 20)
    return tl.sum(wide + ((reach >> 20).to(tl.int64) << 40), 0)


@triton.jit
def search_keys(keys, low, high, k, LINES: tl.constexpr):
    """A number that exactly k of keys [N] reach, or else the k-th largest of them: in [low, high),
    int64. At least k reach low, none reaches high."""
    at_low = tl.full([], -1, tl.int64)
    while (high - low > 1) & (at_low != k):
        one, two, three = trials_of(low, high)
        reach = packed(
            keys >= one.to(tl.int32), keys >= two.to(tl.int32), keys >= three.to(tl.int32), LINES
        )
        low, high, at_low = narrowed(low, high, at_low, one, two, three, counted(reach), k)
    return low


@triton.jit
def count_parts(
    reach, row, part, parts, tallies, arrivals, phase, PARTS: tl.constexpr, APART: tl.constexpr
):
    """`counted` of the lines of all parts, after they have met `phase` times before.

    tallies: [n, 2, parts] int64: who stores into one half has seen all arrive that loaded from it.
    """
    tallies += (row * 2 + phase % 2) * parts
    counts = told(
        tallies, part, counted(reach), parts, 0, arrivals, row, (phase + 1) * parts, PARTS, APART
    )
    return tl.sum(counts, 0)


@triton.jit
def search_parts(
    pieces, low, high, k, row, part, parts, tallies, arrivals, phase,
    PARTS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The number of `search_keys` among those of all parts; and how often they have met."""
    # NaN counts as infinity at first.
    INFINITY: tl.constexpr = 0x7F800000
    high = tl.minimum(high, INFINITY + 1)
    at_low = tl.full([], -1, tl.int64)
    while (high - low > 1) & (at_low != k):
        one, two, three = trials_of(low, high)
        first = number_of(one.to(tl.int32))
        second = number_of(two.to(tl.int32))
        third = number_of(three.to(tl.int32))
        reach = tl.zeros([LINES], tl.int32)
        for n in tl.static_range(len(pieces)):
            x = pieces[n]
            reach += packed((x < first) == 0, (x < second) == 0, (x < third) == 0, LINES)
        counts = count_parts(reach, row, part, parts, tallies, arrivals, phase, PARTS, APART)
        phase += 1
        low, high, at_low = narrowed(low, high, at_low, one, two, three, counts, k)
    least = number_of(low.to(tl.int32))
    if low == INFINITY:
        reach = tl.zeros([LINES], tl.int32)
        for n in tl.static_range(len(pieces)):
            reach += nan_in_lines(pieces[n], LINES)
        counts = count_parts(reach, row, part, parts, tallies, arrivals, phase, PARTS, APART)
        phase += 1
        least = tl.where((counts & 0xFFFFF) >= k, float("nan"), least)
    return least, phase


@triton.jit
def bound_of(
    top, lowest, k, own_share, row, part, parts, arrivals, notes,
    PARTS: tl.constexpr, LINES: tl.constexpr, NEAR: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """From where on a part lists, in the order of `ordered`: `lowest` if it lists nothing. And how
    often the parts have met.

    Up to NEAR it is a part's own k-th largest line maximum: what reaches the largest of these are k
    numbers or more. Beyond, every part takes as many maxima as it has a share of the row, and all
    list what reaches the least of them: in all parts together k numbers, and few more.
    """
    bound = lowest
    phase = tl.full([], 0, tl.int32)
    if (k > 0) & (k <= NEAR):
        bound = tl.maximum(ordered(kth_of(top, k)), lowest + 1)
    elif (k > 0) & (k <= LINES * parts):
        # Too many for a part of its lines: its share of them ends below all its numbers.
        own = tl.where(own_share <= LINES, ordered(kth_of(top, own_share)), lowest)
        phase += 1
        all_bounds = told(
            notes + 3 * parts, part, own, parts, 0x7FFFFFFF, arrivals, row, parts, PARTS, APART
        )
        bound = tl.maximum(tl.min(all_bounds, 0), lowest + 1)
    return bound, phase


@triton.jit
def what_is_kept(
    pieces, k, own_share, row, part, parts, arrivals, notes, numbers, tallies,
    PARTS: tl.constexpr, LINES: tl.constexpr, NEAR: tl.constexpr, SLOTS: tl.constexpr,
    APART: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """The least number that a row of `top_k_kernel` keeps, and with SHARES the sum of all."""
    LOWEST: tl.constexpr = 0.0 if SHARES else float("-inf")
    lowest = ordered(tl.full([], LOWEST, tl.float32))
    top = tops_of(pieces, LINES)
    own_peak = tl.max(top, 0)
    notes += row * 4 * parts
    bound, phase = bound_of(
        top, lowest, k, own_share, row, part, parts, arrivals, notes, PARTS, LINES, NEAR, APART
    )
    count = SLOTS + 1
    numbers += row * parts * SLOTS
    if bound > lowest:
        count = list_part(pieces, number_of(bound), numbers + part * SLOTS, LOWEST, LINES, SLOTS)
    tl.store(notes + part, peak_key_of(pieces, own_peak, LINES))
    tl.store(notes + parts + part, bound)
    tl.store(notes + 2 * parts + part, count)
    phase += 1
    meet(arrivals, row, phase * parts, PARTS, APART)
    LEAST: tl.constexpr = -2147483648
    peak_key = tl.max(of_parts(notes, parts, LEAST, PARTS), 0)
    # A part with a bound above the least has k numbers from there on.
    low = tl.max(of_parts(notes + parts, parts, LEAST, PARTS), 0).to(tl.int64)
    high = peak_key.to(tl.int64) + 1
    found = of_parts(notes + 2 * parts, parts, 0, PARTS)
    peak = number_of(peak_key)
    finite = (peak_key < 0x7F800000) & (peak_key >= 0)
    threshold = number_of(lowest)
    total = 1.0
    if SHARES:
        total = odd_total(peak_key)
    if tl.max(found, 0) <= SLOTS:
        HEAD: tl.constexpr = max(PARTS * SLOTS, 4 * LINES)
        i = tl.arange(0, HEAD)
        number = tl.load(numbers + i, mask=i < parts * SLOTS, other=LOWEST, cache_modifier=".cg")
        if tl.sum(found, 0) >= k:
            least = search_keys(ordered(number), low, high, k, LINES)
            threshold = number_of(least.to(tl.int32))
        if SHARES:  # noqa: SIM102
            if finite:
                total = total_of(tl.sum(whole_sums(number, threshold, peak, LINES), 0), peak)
    else:
        if k > 0:
            threshold, phase = search_parts(
                pieces, low, high, k, row, part, parts, tallies, arrivals, phase,
                PARTS, APART, LINES,
            )  # fmt: skip
        if SHARES:  # noqa: SIM102
            if finite:
                # Not the half from which the last counts are loaded.
                sums = tallies + (row * 2 + phase % 2) * parts
                total = total_of_parts(
                    pieces, threshold, own_peak, peak, row, part, parts, sums, arrivals, phase,
                    PARTS, APART, LINES,
                )  # fmt: skip
    if SHARES:
        # A row that is not finite keeps all.
        threshold = tl.where(finite, threshold, 0.0)
    return threshold, total


@triton.jit(do_not_specialize=["programs"])
def top_k_kernel(
    x, top_k, out, tickets, arrivals, notes, numbers, tallies,
    stride, width, programs, parts, places,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    NEAR: tl.constexpr, SLOTS: tl.constexpr, SHARES: tl.constexpr,
    APART: tl.constexpr, ALIGN: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """out [n, width] = what the row's k largest and their equals are, the others -inf; SHARES: what
    they are divided by their sum, the others 0.

    Written: notes [n, 4, parts] int32: of each part `ordered` of its largest number and of its
    bound, how long its list is, and what `bound_of` leaves there; numbers [n, parts, SLOTS]
    float32: the lists; tallies [n, 2, parts] int64: of `search_parts`, and sums.
    """
    row, part = seat_of(tickets, programs, parts, places, LATE)
    k, _, _ = filters_of(top_k, None, None, row, width)
    # These are not listed: a row that has fewer than k others keeps all.
    LOWEST: tl.constexpr = 0.0 if SHARES else float("-inf")
    # Shares have a sum even where all are kept.
    UNLIMITED: tl.constexpr = -1 if SHARES else 0
    pieces = load_part(x, row, part, stride, width, LOWEST, PART, PIECE, ALIGN)
    if tickets is not None:
        fetch_later(x, row, part, stride, width, programs, parts, places, PART, LINES, ALIGN)
    threshold = LOWEST
    total = 1.0
    if k > UNLIMITED:
        _at, begin = part_at(row * stride, part, PART, ALIGN)
        size = tl.maximum(tl.minimum(begin + PART, width) - tl.maximum(begin, 0), 0)
        # Of k: those of all parts are k or more.
        own_share = ((k.to(tl.int64) * size + width - 1) // width).to(tl.int32)
        threshold, total = what_is_kept(
            pieces, k, own_share, row, part, parts, arrivals, notes, numbers, tallies,
            PARTS, LINES, NEAR, SLOTS, APART, SHARES,
        )  # fmt: skip
    if SHARES:
        store_shares(out, row, part, width, pieces, threshold, total, PART, PIECE, ALIGN)
    else:
        at, begin = part_at(row * width, part, PART, ALIGN)
        for n in tl.static_range(len(pieces)):
            # NaN reaches nothing.
            reach = (pieces[n] >= threshold) | (k == 0)
            kept = tl.where(reach, pieces[n], float("-inf"))
            kept = kept.to(out.dtype.element_ty)
            store_piece(out + at + n * PIECE, begin + n * PIECE, width, kept)
    leave(arrivals, row, parts, PARTS, APART)
