"""Thresholds of probability filters (top-k, top-p, min-p), without sorting.

A row of weights (probabilities, or exp((logit - largest) / temperature)) is split into CHUNKS
chunks, and a chunk into lines of LINE weights. `survey_kernel` computes each chunk's maximum and
sum and, where a row is filtered, each line's maximum. From the line maxima, or for top-p from a
sample of the row, `collect_kernel` (see `collect`) bounds the threshold and lists the weights
between the bounds. `limit` then searches the lists for the threshold, counting and summing the
weights at or above three trial values at a time; a row of which few weights can be kept needs no
search (see `few`).

Weights are compared by their bits as integers, whose order is that of floats >= 0. Sums are in
float64, in an order that depends on the row alone.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, launch_next


@triton.jit
def weight_of(value, peak, temperature, SOFTMAX: tl.constexpr):
    """The weight that is filtered and drawn: a probability as it is, or with SOFTMAX exp((logit -
    peak) / temperature)."""
    if SOFTMAX:
        # exp by exp2, which maps to one hardware instruction.
        return tl.exp2((value - peak) * tl.div_rn(1.4426950408889634, temperature))
    return value


@triton.jit
def bits_of(weight):
    """float32 >= 0 as an int32 with the same order."""
    return weight.to(tl.int32, bitcast=True)


@triton.jit
def ordered(value):
    """Any float as an int32 with the same order, NaN as the largest."""
    wide = value.to(tl.float32) + 0.0
    bits = wide.to(tl.int32, bitcast=True)
    return tl.where(wide != wide, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def number_of(key):
    """Inverse of `ordered`, float32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def temperature_of(temperature, row, SOFTMAX: tl.constexpr):
    """The row's temperature; 1 without a tensor of them."""
    if temperature is not None:
        temp = tl.load(temperature + row)
    elif SOFTMAX:
        temp = tl.full([], 1.0, tl.float32)
    else:
        temp = 1.0
    return temp


@triton.jit
def filters_of(top_k, top_p, min_p, row, width):
    """Parameters of a row: top k (0: all), top p (>= 1: all) and min p; pointers may be None."""
    count = 0
    share = 1.0
    least = 0.0
    if top_k is not None:
        k = tl.load(top_k + row)
        count = tl.where((k >= 1) & (k < width), k, 0).to(tl.int32)
    if top_p is not None:
        share = tl.load(top_p + row)
    if min_p is not None:
        least = tl.load(min_p + row)
    return count, share, least


@triton.jit
def load_chunk(x, chunk, width, CHUNK: tl.constexpr, BEYOND: tl.constexpr):
    """A chunk of a row in float32, padded with BEYOND. Loaded with evict_first, so that the lists
    made of it stay in L2."""
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    if (chunk + 1) * CHUNK <= width:
        value = tl.load(x + place, eviction_policy="evict_first")
    else:
        value = tl.load(x + place, mask=place < width, other=BEYOND, eviction_policy="evict_first")
    return value.to(tl.float32)


@triton.jit
def store_tops(tops, at, value, CHUNK: tl.constexpr, LINE: tl.constexpr):
    """Store the maxima of the lines of chunk `at`, given its values [CHUNK]. A line consists of
    four runs of adjacent elements: a thread holds whole runs, and a line touches few memory
    sectors."""
    lines: tl.constexpr = CHUNK // LINE
    top = tl.max(tl.max(tl.reshape(value, [4, lines, LINE // 4]), 0), 1)
    tl.store(tops + at * lines + tl.arange(0, lines), top)


@triton.jit(early=())
def survey_kernel(
    x, temperature, top_k, top_p, min_p, peaks, firsts, masses, tops, arrivals,
    stride, width, chunks,
    CHUNK: tl.constexpr, LINE: tl.constexpr, SOFTMAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each chunk: peaks [n, chunks] float32, firsts int32 where the peak is, masses float64, the
    sum of weights relative to the peak, and tops [n, chunks, CHUNK / LINE].

    Rows of temperature 0 have no masses, with masses no others have firsts, only rows that are
    filtered have tops; filters, masses and tops may be None. NaN in a chunk is in its mass, or else
    in its peak. arrivals [n] int32 become 0, or are None.
    """
    await_previous(PDL, False)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = row * chunks + chunk
    temp = temperature_of(temperature, row, SOFTMAX)
    count, share, least = filters_of(top_k, top_p, min_p, row, width)
    # Padding beyond the row: a value of weight 0.
    BEYOND: tl.constexpr = float("-inf") if SOFTMAX or masses is None else 0.0
    value = load_chunk(x + row * stride, chunk, width, CHUNK, BEYOND)
    if arrivals is not None:
        tl.store(arrivals + row, 0, mask=chunk == 0)
    greedy = temp == 0.0
    if masses is None:
        greedy = True
    if greedy:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        # `ordered` sorts NaN above every number.
        key = ordered(value)
        best = tl.max(key, 0)
        tl.store(peaks + at, (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
        tl.store(firsts + at, tl.min(tl.where(key == best, place, 0x7FFFFFFF), 0))
    if masses is not None:  # noqa: SIM102
        if temp != 0.0:
            # tl.max ignores NaN, the sum does not.
            peak = tl.max(value, 0)
            tl.store(peaks + at, peak)
            weight = weight_of(value, tl.where(peak == float("-inf"), 0.0, peak), temp, SOFTMAX)
            tl.store(masses + at, tl.sum(weight.to(tl.float64), 0))
            if tops is not None:  # noqa: SIM102
                if (count > 0) | (share < 1.0) | (least > 0.0):
                    store_tops(tops, at, value, CHUNK, LINE)
    # Last: programs of the next kernel that wait would occupy multiprocessors that programs of this
    # one still need.
    launch_next(PDL)


@triton.jit
def summary_of(peaks, masses, row, temp, chunks, CHUNKS: tl.constexpr, SOFTMAX: tl.constexpr):
    """(peak of the row; chunk peaks [CHUNKS]; factors [CHUNKS] that scale chunk sums to the row's
    peak; the scaled chunk sums; whether the row is finite)."""
    c = tl.arange(0, CHUNKS)
    own = c < chunks
    chunk_peak = tl.load(peaks + row * chunks + c, mask=own, other=float("-inf"))
    mass = tl.load(masses + row * chunks + c, mask=own, other=0.0)
    peak = tl.max(chunk_peak, 0)
    polluted = tl.max(((chunk_peak != chunk_peak) | (mass != mass)).to(tl.int32), 0)
    finite = (polluted == 0) & (peak > float("-inf")) & (peak < float("inf"))
    scale = tl.full([CHUNKS], 1.0, tl.float64)
    if SOFTMAX:
        scale = tl.exp((chunk_peak - tl.where(finite, peak, 0.0)) / temp).to(tl.float64)
    return peak, chunk_peak, scale, mass * scale, finite


@triton.jit
def load_head(weights, count, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """The first WIDTH weights of each list, [CHUNKS, WIDTH], padded with 0. The loads have no mask,
    so that they need not wait for the counts."""
    c = tl.arange(0, count.shape[0])
    j = tl.arange(0, WIDTH)
    tile = tl.load(weights + c[:, None] * CHUNK + j[None, :])
    return tl.where(j[None, :] < count[:, None], tile, 0.0)


@triton.jit
def load_list(weights, count, begin, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH weights of each list from index `begin` on, [CHUNKS, WIDTH], padded with 0."""
    c = tl.arange(0, count.shape[0])
    j = begin + tl.arange(0, WIDTH)
    at = weights + c[:, None] * CHUNK + j[None, :]
    return tl.load(at, mask=j[None, :] < count[:, None], other=0.0)


@triton.jit
def reached(tile, one, two, three, MASS: tl.constexpr):
    """Which weights of a tile are >= one, two and three: flags packed 10 bits apart into an int32;
    with MASS also the weights themselves, 0 where lower."""
    key = bits_of(tile)
    reach = (key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 10)
    reach += (key >= three).to(tl.int32) << 20
    first, second, third = 0.0, 0.0, 0.0
    if MASS:
        wide = tile.to(tl.float64)
        first = tl.where(key >= one, wide, 0.0)
        second = tl.where(key >= two, wide, 0.0)
        third = tl.where(key >= three, wide, 0.0)
    return reach, first, second, third


@triton.jit
def added(a, b, c, d, e, f, g, h):
    """Elementwise sum of two quadruples."""
    return a + e, b + f, c + g, d + h


@triton.jit
def tally(weights, head, count, longest, one, two, three, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """How many weights of a row's lists are >= one, two and three, int64, and with MASS their
    sums."""
    WIDTH: tl.constexpr = head.shape[1]
    reach, first, second, third = reached(head, one, two, three, MASS)
    for begin in range(WIDTH, longest, WIDTH):
        tile = load_list(weights, count, begin, CHUNK, WIDTH)
        more, a, b, c = reached(tile, one, two, three, MASS)
        reach += more
        if MASS:
            first += a
            second += b
            third += c
    # Three counts packed into one sum.
    wide = (reach & 0x3FF).to(tl.int64) + ((reach >> 10) & 0x3FF).to(tl.int64) * (1 << 20)
    wide += (reach >> 20).to(tl.int64) << 40
    if MASS:
        # One reduction for all sums: each reduction waits for all warps.
        wide, first, second, third = tl.reduce(
            (tl.ravel(wide), tl.ravel(first), tl.ravel(second), tl.ravel(third)), 0, added
        )
    else:
        wide = tl.sum(wide)
    return wide & 0xFFFFF, (wide >> 20) & 0xFFFFF, wide >> 40, first, second, third


@triton.jit
def compact(
    weights, count, longest, low, high, peak, temp,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Keep the entries 0 < low <= weight < high of a row's lists, in place; SOFTMAX: entries are
    logits and become weights. Returns (counts [CHUNKS]; per list, float64, the sum of weights >=
    high and the sum of those kept)."""
    c = tl.arange(0, count.shape[0])
    left = count * 0
    above = tl.full([count.shape[0], WIDTH], 0.0, tl.float64)
    among = above
    for begin in range(0, longest, WIDTH):
        tile = load_list(weights, count, begin, CHUNK, WIDTH)
        if SOFTMAX:
            inside = begin + tl.arange(0, WIDTH)[None, :] < count[:, None]
            tile = tl.where(inside, weight_of(tile, peak, temp, True), 0.0)
        key = bits_of(tile)
        live = (key > 0) & (key >= low) & (key < high)
        place = left[:, None] + tl.cumsum(live.to(tl.int32), 1) - 1
        # All threads have loaded before any overwrites.
        tl.debug_barrier()
        tl.store(weights + c[:, None] * CHUNK + place, tile, mask=live)
        left += tl.sum(live.to(tl.int32), 1)
        above += tl.where(key >= high, tile, 0.0).to(tl.float64)
        among += tl.where(live, tile, 0.0).to(tl.float64)
    tl.debug_barrier()
    return left, tl.sum(above, 1), tl.sum(among, 1)


@triton.jit
def search(
    weights, head, count, longest, low, high, at_low, wanted, above,
    MASS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Narrow [low, high) until it contains one listed weight or one integer.

    Invariant: the number (MASS: the sum) of weights >= low is at least `wanted`, that of weights >=
    high is less. Stops early when exactly `wanted` weights are >= low. Long lists are compacted as
    the interval shrinks: entries below low are dropped, and with MASS those at or above high.

    Args:
        head: [CHUNKS, WIDTH], the beginning of the lists; count: [CHUNKS], their lengths; longest:
            the largest count.
        at_low: int64, how many weights are >= low at the beginning; no listed one is >= high.
        above: [CHUNKS] float64, the sums of weights >= high, which are not listed.
    Returns:
        (low; number of weights >= low; number >= high; with MASS the sum of the latter; head;
        count; longest; above, increased by what was compacted away at or above high).
    """
    at_high = tl.full([], 0, tl.int64)
    mass_high = tl.sum(above, 0)
    lost, mass_lost = at_high, mass_high
    size = tl.sum(count, 0)
    searching = (high - low > 1) & (at_low - at_high > 1)
    while searching:
        step = tl.maximum((high - low) >> 2, 1)
        one = low + step
        two = one + step
        three = two + step
        n_one, n_two, n_three, m_one, m_two, m_three = tally(
            weights, head, count, longest, one, two, three, MASS, CHUNK
        )
        n_one += lost
        n_two += lost
        n_three += lost
        if MASS:
            m_one += mass_lost
            m_two += mass_lost
            m_three += mass_lost
            by_one, by_two, by_three = m_one >= wanted, m_two >= wanted, m_three >= wanted
        else:
            by_one, by_two, by_three = n_one >= wanted, n_two >= wanted, n_three >= wanted
        # Upper bound: the lowest trial that is too high. Lower bound: the highest one that is not.
        high = tl.where(by_one, tl.where(by_two, tl.where(by_three, high, three), two), one)
        at_high = tl.where(
            by_one, tl.where(by_two, tl.where(by_three, at_high, n_three), n_two), n_one
        )
        low = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
        at_low = tl.where(
            by_three, n_three, tl.where(by_two, n_two, tl.where(by_one, n_one, at_low))
        )
        searching = (high - low > 1) & (at_low - at_high > 1)
        if MASS:
            mass_high = tl.where(
                by_one, tl.where(by_two, tl.where(by_three, mass_high, m_three), m_two), m_one
            )
            live, top = at_low - at_high, high
        else:
            live, top = at_low, 0x7FFFFFFF
            searching = searching & (at_low != wanted)
        if (longest > head.shape[1]) & (live * 2 < size):
            count, more, _ = compact(
                weights, count, longest, low, top, 0.0, 1.0, CHUNK, head.shape[1], False
            )
            head = load_list(weights, count, 0, CHUNK, head.shape[1])
            longest, size = tl.max(count, 0), tl.sum(count, 0)
            above += more
            if MASS:
                lost, mass_lost = at_high, mass_high
    return low, at_low, at_high, mass_high, head, count, longest, above


@triton.jit
def shares_of(tile, threshold):
    """(the tile's weights above the threshold, float64, 0 elsewhere; flags of those equal to
    it)."""
    key = bits_of(tile)
    above = tl.where(key > threshold, tile, 0.0).to(tl.float64)
    return above, (key == threshold).to(tl.int32)


@triton.jit
def limit(
    weights, head, count, above, reached, top, floor, ceiling, k, share, least, total,
    SHARE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The threshold of a row's filters.

    Args:
        weights, head, count, above: the row's lists, which are changed, as in `search`.
        reached: float64, the sum of all weights listed or above, if k is 0.
        top: the row's largest weight; floor, ceiling: the bounds of the lists, as bits.
        k, share, least: the row's top k, top p and min p, as returned by `filters_of`.
        total: float64, the row's sum.
        SHARE: 0: share is a sum of weights; 1: a part of total; 2: a part of the top k's sum.
    Returns:
        (the least weight that is kept, as bits; per list the kept sum, float64; per list how many
        of the weights equal to the least are kept, the first ones; whether that may not be all).
    """
    low = floor
    end = ceiling
    longest = tl.max(count, 0)
    listed = tl.sum(count, 0).to(tl.int64)
    room = 1 << 30
    if (k > 0) & (listed > k):
        low, _, _, _, head, count, longest, _ = search(
            weights, head, count, longest, low, end, listed, k, above, False, CHUNK
        )
    bound = tl.maximum(low, bits_of(least * top))
    if share < 1.0:
        # Without top-k, every listed weight reaches the bound.
        at_bound, below, mass = listed, total, reached
        if k > 0:
            _, at_bound, _, below, mass, _ = tally(
                weights, head, count, longest, low, bound, end, True, CHUNK
            )
            mass += tl.sum(above, 0)
        wanted = share.to(tl.float64)
        if SHARE == 1:
            wanted *= total
        if SHARE == 2:
            wanted *= below
        # The largest weight is kept even with top_p = 0.
        wanted = tl.maximum(wanted, 1e-300)
        if mass >= wanted:
            bound, at_low, at_high, mass_high, head, count, longest, above = search(
                weights, head, count, longest, bound, end, at_bound, wanted, above, True, CHUNK
            )
            if at_low - at_high > 1:
                # Among equal weights at the bound, keep as many as it takes to reach `wanted`.
                equal = bound.to(tl.float32, bitcast=True).to(tl.float64)
                fitting = tl.math.ceil((wanted - mass_high) / equal)
                room = tl.minimum(fitting, 1073741824.0).to(tl.int32)
    sums, equals = shares_of(head, bound)
    for begin in range(head.shape[1], longest, head.shape[1]):
        tile = load_list(weights, count, begin, CHUNK, head.shape[1])
        more, several = shares_of(tile, bound)
        sums += more
        equals += several
    sums, equals = tl.sum(sums, 1), tl.sum(equals, 1)
    before = tl.cumsum(equals, 0) - equals
    taken = tl.minimum(tl.maximum(room - before, 0), equals)
    # A bound of 0 matches the padding after the listed weights: take none of it.
    taken = tl.where(bound > 0, taken, 0)
    weight = bound.to(tl.float32, bitcast=True).to(tl.float64)
    return bound, above + sums + taken.to(tl.float64) * weight, taken, room < (1 << 30)


@triton.jit
def first_beyond(mass, target, place):
    """The first place where the running sum of mass [N] float64 exceeds target and mass > 0; if
    rounding lets none do so, the last place with mass > 0; 0 if there is none."""
    able = mass > 0.0
    beyond = able & (tl.cumsum(mass, 0) > target)
    # One minimum finds the first place beyond target or, if there is none, the last place with
    # mass.
    order = tl.where(beyond, place, tl.where(able, 0x60000000 - place, 0x60000000))
    found = tl.min(order, 0)
    return tl.where(found < 0x20000000, found, 0x60000000 - found)
