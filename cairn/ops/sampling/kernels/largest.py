"""The k largest of a row, by a team: see `teams` and `lines`.

For a small k each part lists its own largest numbers, more than are likely to be among the k
largest of the row, and all parts search all lists. What they find is the k-th largest if no part
has left out as large a one. Else, or for a larger k, they list together what reaches a bound: what
was found, or the k-th largest of some maxima that all parts tell each other. Where this list is too
long, or k is more than there are maxima, they count what reaches some numbers, step by step.
"""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import filters_of, ordered
from cairn.ops.sampling.kernels.lines import (
    first_line,
    lines_from,
    load_line,
    load_tile,
    most_lines,
    store_kept,
    survey_lines,
    total_from,
)
from cairn.ops.sampling.kernels.teams import (
    leave,
    meet,
    number_of,
    odd_total,
    of_parts,
    part_at,
    seat_of,
    told,
    total_of,
    units_of,
)


@triton.jit
def bound_of(
    peaks, k, row, part, parts, arrivals, told_keys,
    PARTS: tl.constexpr, TOLD: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """A number that k of the row reach, in the order of `ordered`, after the parts have met once;
    and the largest number of the row.

    Each part tells the maxima of TOLD equal shares of it: of these k <= TOLD * parts reach the
    number. peaks: of `survey_lines`; told_keys: [TOLD * parts].
    """
    shares = tl.max(tl.reshape(peaks, [TOLD, peaks.shape[0] // TOLD]), 1)
    tl.store(told_keys + part * TOLD + tl.arange(0, TOLD), shares)
    meet(arrivals, row, parts, PARTS, APART)
    i = tl.arange(0, PARTS * TOLD)
    own = i < parts * TOLD
    keys = tl.load(told_keys + i, mask=own, other=-2147483648, cache_modifier=".cg")
    peak = tl.max(keys, 0)
    least = tl.min(tl.where(own, keys, peak), 0)
    # A few more are listed sooner than these few are told apart.
    bound = search_list(keys, least.to(tl.int64), peak.to(tl.int64) + 1, k, 16)
    return bound.to(tl.int32), peak


@triton.jit
def list_part(
    x, tops, bound, begin, width, numbers, count, other,
    DEPTH: tl.constexpr, EACH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write a part's numbers that reach the bound, or are NaN, into numbers [SLOTS] float32; beyond
    SLOTS they are not. How many they are.

    count: where parts count what they add to a list of all, in any order; None: the list is the
    part's own, `other` behind them.
    """
    HELD: tl.constexpr = len(tops)
    word = lines_from(tops, bound)
    found = tl.full([], 0, tl.int32)
    for _ in range(most_lines(word, HELD)):
        held, rest = first_line(word, HELD)
        live = word != 0
        tiles = load_line(x, held, live, begin, width, other, HELD, DEPTH, EACH)
        each = tl.zeros(word.shape, tl.int32)
        for d in tl.static_range(DEPTH):
            each += tl.sum(((tiles[d] < bound) == 0).to(tl.int32), 1)
        each = tl.where(live, each, 0)
        if count is None:
            place = found + tl.cumsum(each, 0) - each
        else:
            at = count + tl.zeros(word.shape, tl.int32)
            place = tl.atomic_add(at, each, mask=each > 0, sem="relaxed")
        for d in tl.static_range(DEPTH):
            hit = (tiles[d] < bound) == 0
            slot = place[:, None] + tl.cumsum(hit.to(tl.int32), 1) - 1
            tl.store(numbers + slot, tiles[d], mask=hit & live[:, None] & (slot < SLOTS))
            place += tl.sum(hit.to(tl.int32), 1)
        found += tl.sum(each, 0)
        word = rest
    if count is None:
        i = tl.arange(0, SLOTS)
        tl.store(numbers + i, tl.full([SLOTS], other, tl.float32), mask=i >= found)
    return found


@triton.jit
def trials_of(low, high):
    """Three numbers in (low, high), int64, high - low > 1."""
    step = tl.maximum((high - low) >> 2, 1)
    one = low + step
    two = tl.minimum(one + step, high - 1)
    return one, two, tl.minimum(two + step, high - 1)


@triton.jit
def narrowed(low, high, at_low, one, two, three, counts, k, BITS: tl.constexpr):
    """[low, high), and how many reach low, after a step: counts holds, BITS each, how many reach
    each of the trials."""
    FIELD: tl.constexpr = (1 << BITS) - 1
    n_one, n_two, n_three = counts & FIELD, (counts >> BITS) & FIELD, counts >> (2 * BITS)
    by_one, by_two, by_three = n_one >= k, n_two >= k, n_three >= k
    high = tl.where(by_three, high, tl.where(by_two, three, tl.where(by_one, two, one)))
    low = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
    at_low = tl.where(by_three, n_three, tl.where(by_two, n_two, tl.where(by_one, n_one, at_low)))
    return low, high, at_low


@triton.jit
def search_list(keys, low, high, k, spare):
    """A number that k of keys [N] reach and at most `spare` more, or else the k-th largest of them:
    in [low, high), int64. At least k reach low, none reaches high."""
    BITS: tl.constexpr = 10 if keys.shape[0] < 1024 else 20
    WORD: tl.constexpr = tl.int32 if BITS == 10 else tl.int64
    at_low = tl.full([], 1 << 29, WORD)
    while (high - low > 1) & (at_low - k > spare):
        one, two, three = trials_of(low, high)
        reach = (keys >= one.to(tl.int32)).to(WORD)
        reach += (keys >= two.to(tl.int32)).to(WORD) << BITS
        reach += (keys >= three.to(tl.int32)).to(WORD) << (2 * BITS)
        counts = tl.sum(reach, 0)
        low, high, at_low = narrowed(low, high, at_low, one, two, three, counts, k, BITS)
    return low


@triton.jit
def reach_in_part(
    x, begin, width, other, first, second, third,
    HELD: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """How many of a part reach each of three numbers, 20 bits each, int64. NaN reaches all."""
    TILE: tl.constexpr = LINES * EACH
    reach = tl.zeros([LINES], tl.int32)
    for n in range(HELD * DEPTH):
        tile = load_tile(x + n * TILE, begin + n * TILE, width, other, LINES, EACH, False)
        bits = ((tile < first) == 0).to(tl.int32) + (((tile < second) == 0).to(tl.int32) << 10)
        reach += tl.sum(bits + (((tile < third) == 0).to(tl.int32) << 20), 1)
    wide = (reach & 0x3FF).to(tl.int64) + (((reach >> 10) & 0x3FF).to(tl.int64) << 20)
    return tl.sum(wide + ((reach >> 20).to(tl.int64) << 40), 0)


@triton.jit
def nan_in_part(
    x, begin, width, HELD: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """How many of a part are NaN, int64."""
    TILE: tl.constexpr = LINES * EACH
    count = tl.zeros([LINES], tl.int32)
    for n in range(HELD * DEPTH):
        tile = load_tile(x + n * TILE, begin + n * TILE, width, 0.0, LINES, EACH, False)
        count += tl.sum((tile != tile).to(tl.int32), 1)
    return tl.sum(count.to(tl.int64), 0)


@triton.jit
def count_of_parts(
    own, row, part, parts, tallies, arrivals, phase, PARTS: tl.constexpr, APART: tl.constexpr
):
    """What all parts count, int64, after they have met `phase` times before.

    tallies: [n, 2, parts] int64: who stores into one half has seen all arrive that loaded from it.
    """
    at = tallies + (row * 2 + phase % 2) * parts
    counts = told(at, part, own, parts, 0, arrivals, row, (phase + 1) * parts, PARTS, APART)
    return tl.sum(counts, 0)


@triton.jit
def search_parts(
    x, begin, width, other, low, high, k, row, part, parts, tallies, arrivals, phase,
    PARTS: tl.constexpr, APART: tl.constexpr, HELD: tl.constexpr, DEPTH: tl.constexpr,
    LINES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The number of `search_list` among those of all parts, after these have met `phase` times; and
    how often they have met."""
    # NaN counts as infinity at first.
    INFINITY: tl.constexpr = 0x7F800000
    high = tl.minimum(high, INFINITY + 1)
    at_low = tl.full([], 1 << 29, tl.int64)
    while (high - low > 1) & (at_low > k):
        one, two, three = trials_of(low, high)
        own = reach_in_part(
            x, begin, width, other, number_of(one.to(tl.int32)), number_of(two.to(tl.int32)),
            number_of(three.to(tl.int32)), HELD, DEPTH, LINES, EACH,
        )  # fmt: skip
        counts = count_of_parts(own, row, part, parts, tallies, arrivals, phase, PARTS, APART)
        phase += 1
        low, high, at_low = narrowed(low, high, at_low, one, two, three, counts, k, 20)
    least = number_of(low.to(tl.int32))
    if low == INFINITY:
        own = nan_in_part(x, begin, width, HELD, DEPTH, LINES, EACH)
        count = count_of_parts(own, row, part, parts, tallies, arrivals, phase, PARTS, APART)
        phase += 1
        least = tl.where(count >= k, float("nan"), least)
    return least, phase


@triton.jit
def clamped(bound, lowest):
    """A bound of what is listed, in the order of `ordered`: nothing as low as `lowest` is, and NaN
    is with infinity."""
    return tl.minimum(tl.maximum(bound, lowest + 1), 0x7F800000)


@triton.jit
def least_of(number, found, k, bound, lowest, peak_key):
    """The k-th largest of a list of `found` numbers [N] float32 that reach the bound, or the next
    larger one, in the order of `ordered`; `lowest` if there are fewer."""
    key = lowest.to(tl.int64)
    if found >= k:
        key = search_list(ordered(number), bound.to(tl.int64), peak_key.to(tl.int64) + 1, k, 0)
    return key.to(tl.int32)


@triton.jit
def sum_from(number, least, peak_key):
    """Of [N] float32 the sum of those that are at least `least` >= 0, in `units_of` the row's
    largest."""
    one, two = units_of(number_of(peak_key))
    kept = tl.where(number >= least, number, 0.0)
    return tl.sum((kept * one * two).to(tl.int64), 0)


@triton.jit
def own_wanted(k, parts):
    """How many of its largest numbers a part lists at least: seldom are more of the row's k largest
    in it, if these lie anywhere."""
    mean = k.to(tl.float32) / parts
    return tl.minimum(k, tl.math.ceil(mean + 4.0 * tl.sqrt_rn(mean)).to(tl.int32))


@triton.jit
def try_own_lists(
    x, tops, peaks, wanted, lowest, begin, width, k, row, part, parts, arrivals, notes, numbers,
    PARTS: tl.constexpr, DEPTH: tl.constexpr, EACH: tl.constexpr, OWN: tl.constexpr,
    APART: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """The k-th largest number of a row, from lists [OWN] of what each part has from its own
    `wanted`-th largest on, after the parts have met once.

    Returns:
        Whether the lists tell it; the number, in the order of `ordered`, `lowest` if there are
        fewer: else one that k reach, or `lowest`; `sum_from` it on; the row's largest number.
    """
    own_peak = tl.max(peaks, 0)
    own_least = tl.min(peaks, 0)
    bound = search_list(peaks, own_least.to(tl.int64), own_peak.to(tl.int64) + 1, wanted, 4)
    bound = clamped(bound.to(tl.int32), lowest)
    found = list_part(
        x, tops, number_of(bound), begin, width, numbers + part * OWN, None, LOWEST, DEPTH, EACH,
        OWN,
    )  # fmt: skip
    tl.store(notes + part, own_peak)
    tl.store(notes + parts + part, bound)
    tl.store(notes + 2 * parts + part, found)
    meet(arrivals, row, parts, PARTS, APART)
    i = tl.arange(0, PARTS * OWN)
    number = tl.load(numbers + i, mask=i < parts * OWN, other=LOWEST, cache_modifier=".cg")
    peak_key = tl.max(of_parts(notes, parts, -2147483648, PARTS), 0)
    bounds = of_parts(notes + parts, parts, -2147483648, PARTS)
    highest = tl.max(bounds, 0)
    least = tl.min(tl.where(tl.arange(0, PARTS) < parts, bounds, highest), 0)
    counts = of_parts(notes + 2 * parts, parts, 0, PARTS)
    listed = tl.sum(tl.minimum(counts, OWN), 0)
    key = least_of(number, listed, k, least, lowest, peak_key)
    sure = (tl.max(counts, 0) <= OWN) & ((key >= highest) | (highest == lowest + 1))
    return sure, key, sum_from(number, number_of(key), peak_key), peak_key


@triton.jit
def least_listed(numbers, found, k, bound, lowest, peak_key, N: tl.constexpr, LOWEST: tl.constexpr):
    """`least_of` the list that parts make together, of `found` <= N numbers, and `sum_from` it
    on."""
    i = tl.arange(0, N)
    number = tl.load(numbers + i, mask=i < found, other=LOWEST, cache_modifier=".cg")
    key = least_of(number, found, k, bound, lowest, peak_key)
    return key, sum_from(number, number_of(key), peak_key)


@triton.jit
def what_is_kept(
    x, tops, peaks, begin, width, k, row, part, parts, arrivals, notes, numbers, tallies,
    PARTS: tl.constexpr, HELD: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr,
    EACH: tl.constexpr, TOLD: tl.constexpr, OWN: tl.constexpr, SLOTS: tl.constexpr,
    APART: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """The least number that a row of `top_k_kernel` keeps, and with SHARES the sum of all."""
    LOWEST: tl.constexpr = 0.0 if SHARES else float("-inf")
    lowest = ordered(tl.full([], LOWEST, tl.float32))
    notes += row * TOLD * parts
    numbers += row * (parts * OWN + SLOTS)
    # So lists have room for twice as many, and not all threads have one of them.
    MOST: tl.constexpr = min(OWN // 2, LINES * 3 // 4)
    wanted = own_wanted(k, parts)
    phase = tl.full([], 1, tl.int32)
    if (k > 0) & (wanted <= MOST):
        sure, key, sums, peak_key = try_own_lists(
            x, tops, peaks, wanted, lowest, begin, width, k, row, part, parts, arrivals, notes,
            numbers, PARTS, DEPTH, EACH, OWN, APART, LOWEST,
        )  # fmt: skip
    else:
        key, peak_key = bound_of(
            peaks, tl.minimum(k, TOLD * parts), row, part, parts, arrivals, notes, PARTS, TOLD,
            APART,
        )  # fmt: skip
        key = tl.where((k > 0) & (k <= TOLD * parts), clamped(key, lowest), lowest)
        sure = k < 0
        sums = tl.full([], 0, tl.int64)
    found = SLOTS + 1
    numbers += parts * OWN
    if (sure == 0) & (key > lowest):
        count = arrivals + row * APART + 2
        list_part(x, tops, number_of(key), begin, width, numbers, count, LOWEST, DEPTH, EACH, SLOTS)
        meet(arrivals, row, 2 * parts, PARTS, APART)
        phase += 1
        found = tl.load(count, cache_modifier=".cg")
        if found <= LINES:
            sure = found >= 0
            key, sums = least_listed(numbers, found, k, key, lowest, peak_key, LINES, LOWEST)
        elif found <= SLOTS:
            sure = found >= 0
            key, sums = least_listed(numbers, found, k, key, lowest, peak_key, SLOTS, LOWEST)
    threshold = number_of(key)
    peak = number_of(peak_key)
    finite = (peak_key < 0x7F800000) & (peak_key >= 0)
    total = 1.0
    if SHARES:
        total = odd_total(peak_key)
        if finite:
            total = total_of(sums, peak)
    if sure == 0:
        if k > 0:
            threshold, phase = search_parts(
                x, begin, width, LOWEST, key.to(tl.int64), peak_key.to(tl.int64) + 1, k, row,
                part, parts, tallies, arrivals, phase, PARTS, APART, HELD, DEPTH, LINES, EACH,
            )  # fmt: skip
        if SHARES & finite:
            # Not the half from which the last counts are loaded.
            at = tallies + (row * 2 + phase % 2) * parts
            total = total_from(
                x, tops, threshold, peak, begin, width, row, part, parts, at, arrivals, phase,
                PARTS, APART, HELD, DEPTH, EACH,
            )  # fmt: skip
    if SHARES:
        # A row that is not finite keeps all.
        threshold = tl.where(finite, threshold, 0.0)
    return threshold, total


@triton.jit(do_not_specialize=["programs"])
def top_k_kernel(
    x, top_k, out, tickets, arrivals, notes, numbers, tallies,
    stride, width, programs, parts, places,
    PARTS: tl.constexpr, HELD: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr,
    EACH: tl.constexpr, TOLD: tl.constexpr, OWN: tl.constexpr, SLOTS: tl.constexpr,
    SHARES: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr, LATE: tl.constexpr,
    ABREAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n, width] = what the row's k largest and their equals are, the others -inf; SHARES: what
    they are divided by their sum, the others 0.

    Written: notes [n, TOLD * parts] int32: what parts tell; numbers [n, parts * OWN + SLOTS]
    float32: their lists, and that of all; tallies [n, 2, parts] int64: of `search_parts`, and sums.
    """
    PART: tl.constexpr = HELD * DEPTH * LINES * EACH
    await_previous(EARLY)
    row, part = seat_of(tickets, programs, parts, places, LATE, ABREAST)
    k, _, _ = filters_of(top_k, None, None, row, width)
    # These are not listed: a row that has fewer than k others keeps all.
    LOWEST: tl.constexpr = 0.0 if SHARES else float("-inf")
    # Shares have a sum even where all are kept.
    UNLIMITED: tl.constexpr = -1 if SHARES else 0
    at, begin = part_at(row * stride, part, PART, ALIGN)
    x += at
    tops, peaks = survey_lines(x, begin, width, LOWEST, HELD, DEPTH, LINES, EACH)
    threshold = LOWEST
    total = 1.0
    if k > UNLIMITED:
        threshold, total = what_is_kept(
            x, tops, peaks, begin, width, k, row, part, parts, arrivals, notes, numbers, tallies,
            PARTS, HELD, DEPTH, LINES, EACH, TOLD, OWN, SLOTS, APART, SHARES,
        )  # fmt: skip
    at, _ = part_at(row * width, part, PART, ALIGN)
    store_kept(x, out + at, tops, threshold, total, k == 0, begin, width, DEPTH, EACH, SHARES)
    leave(arrivals, row, parts, PARTS, APART)
