"""Filters of rows that a team of programs holds in registers: read once, written once.

A row is split into parts of PART numbers, each held by one program from the load to the store.
What the parts have to know of each other they leave in memory, and meet: then each does the same
with what all have left, so that nobody waits for a leader.

The k-th largest: each part lists its numbers from a bound on that the largest maxima of its lines
tell, its own or those of all parts. All lists together hold the row's k largest; every program
searches them. Where lists are too long, or k is more than there are lines, the team counts what its
registers hold, step by step.

Sums are of whole numbers, units of 2^-42 of the largest: they are the same in any order, and so do
not depend on how a row is split.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import bits_of, filters_of, ordered


@triton.jit
def seat_of(tickets, parts):
    """A program's row and part.

    With tickets programs sit in the order in which they begin. Those that begin fill team after
    team: the first team that is not done has all its members, or they are the next to begin, and
    no team behind it can take their places. Without, all of the launch have a place.
    """
    number = tl.program_id(0)
    if tickets is not None:
        number = tl.atomic_add(tickets, 1, sem="relaxed")
    return (number // parts).to(tl.int64), number % parts


@triton.jit
def meet(arrivals, row, wanted, PARTS: tl.constexpr, APART: tl.constexpr):
    """Wait until the row's parts have arrived `wanted` times: what they stored before can then be
    loaded. A part alone waits for its own threads."""
    # What all threads stored is done before one of them says so.
    tl.debug_barrier()
    if PARTS > 1:
        arrivals += row * APART
        here = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
        while here < wanted:
            here = tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@triton.jit
def grouped(value, LINES: tl.constexpr):
    """[N] as [N / 4 / LINES, LINES, 4]: with as many lines as threads, each holds a line."""
    return tl.reshape(value, [value.shape[0] // (4 * LINES), LINES, 4])


@triton.jit
def sum_of_lines(value, LINES: tl.constexpr):
    """Of [N], the sums of its lines [LINES]."""
    return tl.sum(tl.sum(grouped(value, LINES), 2), 0)


@triton.jit
def number_of(key):
    """The float that `ordered` makes `key` of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def part_at(base, part, PART: tl.constexpr, ALIGN: tl.constexpr):
    """Where a part of a row `base` numbers behind an aligned address begins: aligned, int64, and
    its place in the row, int32, which may lie in front of the row."""
    shift = base % ALIGN
    return tl.multiple_of(base - shift + part * PART, ALIGN), part * PART - shift.to(tl.int32)


@triton.jit
def load_piece(x, begin, width, other, PIECE: tl.constexpr):
    """[PIECE] float32, numbers of a row whose begin-th lies at x, `other` beyond it."""
    i = tl.arange(0, PIECE)
    if (begin >= 0) & (begin + PIECE <= width):
        value = tl.load(x + i)
    else:
        value = tl.load(x + i, mask=(i >= -begin) & (i < width - begin), other=other)
    wide = value.to(tl.float32)
    if value.dtype != tl.float32:
        # Nothing, but not known to the compiler: it would hold the short numbers too, to store.
        wide = (wide.to(tl.int32, bitcast=True) | (width >> 31)).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def store_piece(out, begin, width, value):
    """Write a row's numbers from the begin-th on, which lies at out."""
    i = tl.arange(0, value.shape[0])
    if (begin >= 0) & (begin + value.shape[0] <= width):
        tl.store(out + i, value)
    else:
        tl.store(out + i, value, mask=(i >= -begin) & (i < width - begin))


@triton.jit
def load_part(
    x, row, part, stride, width, other,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A part of a row in pieces [PIECE], `other` beyond it.

    What is done with a part is done piece by piece: done with all of it at once, what lies between
    its numbers and their sum would take as many registers as they do.
    """
    at, begin = part_at(row * stride, part, PART, ALIGN)
    pieces = ()
    for n in tl.static_range(PART // PIECE):
        piece = load_piece(x + at + n * PIECE, begin + n * PIECE, width, other, PIECE)
        pieces = pieces + (piece,)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def tops_of(pieces, LINES: tl.constexpr):
    """The lines' maxima [LINES] float32; infinity for NaN."""
    top = tl.full([LINES], float("-inf"), tl.float32)
    for n in tl.static_range(len(pieces)):
        known = tl.where(pieces[n] != pieces[n], float("inf"), pieces[n])
        top = tl.maximum(top, tl.max(tl.max(grouped(known, LINES), 2), 0))
    return top


@triton.jit
def nan_in_lines(value, LINES: tl.constexpr):
    """How many of [N] are NaN, by line [LINES]."""
    # As integers: the comparison of `tops_of` would be kept for this, a register of each number.
    magnitude = bits_of(value) & 0x7FFFFFFF
    return sum_of_lines((magnitude > 0x7F800000).to(tl.int32), LINES)


@triton.jit
def peak_key_of(pieces, peak, LINES: tl.constexpr):
    """`ordered` of a part's largest number, `peak` where NaN is infinity; NaN is above all."""
    key = ordered(peak)
    if peak == float("inf"):
        odd = tl.zeros([LINES], tl.int32)
        for n in tl.static_range(len(pieces)):
            odd += nan_in_lines(pieces[n], LINES)
        key = tl.where(tl.max(odd, 0) > 0, 0x7FFFFFFF, key)
    return key


@triton.jit
def kth_of(top, k):
    """The k-th largest of [N]: the least of those that fewer than k are larger than."""
    larger = tl.sum((top[:, None] > top[None, :]).to(tl.int32), 0)
    return tl.min(tl.where(larger < k, top, float("inf")), 0)


@triton.jit
def columns(value, LINES: tl.constexpr):
    """[N] as [N / LINES, LINES]: a column is a line, and a thread's."""
    tile = tl.permute(grouped(value, LINES), (0, 2, 1))
    return tl.reshape(tile, [value.shape[0] // LINES, LINES])


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
    p = tl.arange(0, PARTS)
    tallies += (row * 2 + phase % 2) * parts
    tl.store(tallies + part, counted(reach))
    meet(arrivals, row, (phase + 1) * parts, PARTS, APART)
    return tl.sum(tl.load(tallies + p, mask=p < parts, other=0, cache_modifier=".cg"), 0)


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
def units_of(peak):
    """Two powers of two whose product brings a positive float32 to [2^42, 2^43): sums of 2^19 up to
    it fit int64."""
    shift = 169 - (bits_of(peak) >> 23)
    half = shift >> 1
    one = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return one, ((shift - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def whole_sums(weight, least, peak, LINES: tl.constexpr):
    """Of [N] float32 the sums [LINES] of those that are at least `least` >= 0, in `units_of` the
    row's largest."""
    one, two = units_of(peak)
    kept = tl.where(weight >= least, weight, 0.0)
    return sum_of_lines((kept * one * two).to(tl.int64), LINES)


@triton.jit
def total_of(sums, peak):
    """What results are divided by, from a sum in `units_of` the row's largest."""
    one, two = units_of(peak)
    total = sums.to(tl.float64) / one.to(tl.float64) / two.to(tl.float64)
    return tl.maximum(total.to(tl.float32), 1.1754943508222875e-38)


@triton.jit
def odd_total(peak_key):
    """The same of a row that is not finite, from `ordered` of its largest."""
    return tl.maximum(number_of(peak_key), 1.1754943508222875e-38)


@triton.jit
def total_of_parts(
    pieces, least, own_peak, peak, row, part, parts, sums, arrivals, phase,
    PARTS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """`total_of` what all parts have from `least` on; sums [parts] int64 is written. A part whose
    own peak is below does not add up its zeros."""
    own = tl.full([], 0, tl.int64)
    if own_peak >= least:
        mass = tl.zeros([LINES], tl.int64)
        for n in tl.static_range(len(pieces)):
            mass += whole_sums(pieces[n], least, peak, LINES)
        own = tl.sum(mass, 0)
    p = tl.arange(0, PARTS)
    tl.store(sums + part, own)
    meet(arrivals, row, (phase + 1) * parts, PARTS, APART)
    whole = tl.sum(tl.load(sums + p, mask=p < parts, other=0, cache_modifier=".cg"), 0)
    return total_of(whole, peak)


@triton.jit
def store_shares(
    out, row, part, width, pieces, least, total,
    PART: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A part of a row of out = what is not below `least`, divided by total; else 0."""
    at, begin = part_at(row * width, part, PART, ALIGN)
    for n in tl.static_range(len(pieces)):
        share = tl.where(pieces[n] < least, 0.0, pieces[n]) / total
        store_piece(out + at + n * PIECE, begin + n * PIECE, width, share)


@triton.jit
def min_p_kernel(
    x, min_p, out, tickets, arrivals, peaks, sums, stride, width, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    APART: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x where it is at least min_p of its row's largest, divided by the sum of
    these; else 0. peaks [n, parts] int32 and sums [n, parts] int64 are written."""
    row, part = seat_of(tickets, parts)
    share = tl.load(min_p + row)
    pieces = load_part(x, row, part, stride, width, 0.0, PART, PIECE, ALIGN)
    own_peak = tl.max(tops_of(pieces, LINES), 0)
    p = tl.arange(0, PARTS)
    tl.store(peaks + row * parts + part, peak_key_of(pieces, own_peak, LINES))
    meet(arrivals, row, parts, PARTS, APART)
    key = tl.load(peaks + row * parts + p, mask=p < parts, other=0, cache_modifier=".cg")
    peak_key = tl.max(key, 0)
    peak = number_of(peak_key)
    threshold = 0.0
    if peak_key < 0x7F800000:
        least = share * peak
        threshold = tl.where(least > 0.0, least, 0.0)
        total = total_of_parts(
            pieces, threshold, own_peak, peak, row, part, parts, sums + row * parts, arrivals, 1,
            PARTS, APART, LINES,
        )  # fmt: skip
    else:
        total = odd_total(peak_key)
    store_shares(out, row, part, width, pieces, threshold, total, PART, PIECE, ALIGN)


@triton.jit
def top_k_kernel(
    x, top_k, out, tickets, arrivals, notes, numbers, tallies, stride, width, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    NEAR: tl.constexpr, SLOTS: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """out [n, width] = what the row's k largest and their equals are, the others -inf; SHARES: what
    they are divided by their sum, the others 0.

    Written: notes [n, 4, parts] int32: of each part `ordered` of its largest number and of its
    bound, how long its list is, and what `bound_of` leaves there; numbers [n, parts, SLOTS]
    float32: the lists; tallies [n, 2, parts] int64: of `search_parts`, and sums.
    """
    row, part = seat_of(tickets, parts)
    k, _, _ = filters_of(top_k, None, None, row, width)
    # These are not listed: a row that has fewer than k others keeps all.
    LOWEST: tl.constexpr = 0.0 if SHARES else float("-inf")
    # Shares have a sum even where all are kept.
    UNLIMITED: tl.constexpr = -1 if SHARES else 0
    pieces = load_part(x, row, part, stride, width, LOWEST, PART, PIECE, ALIGN)
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
        tl.store(notes + 3 * parts + part, own)
        phase += 1
        meet(arrivals, row, parts, PARTS, APART)
        p = tl.arange(0, PARTS)
        note = tl.load(
            notes + 3 * parts + p, mask=p < parts, other=0x7FFFFFFF, cache_modifier=".cg"
        )
        bound = tl.maximum(tl.min(note, 0), lowest + 1)
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
    p = tl.arange(0, PARTS)
    note = tl.load(notes + p, mask=p < parts, other=-2147483648, cache_modifier=".cg")
    peak_key = tl.max(note, 0)
    note = tl.load(notes + parts + p, mask=p < parts, other=-2147483648, cache_modifier=".cg")
    # A part with a bound above the least has k numbers from there on.
    low = tl.max(note, 0).to(tl.int64)
    high = peak_key.to(tl.int64) + 1
    found = tl.load(notes + 2 * parts + p, mask=p < parts, other=0, cache_modifier=".cg")
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
