"""Lists of the weights of a row among which a filter's threshold lies: see `filters`.

A row has CHUNKS lists. Mostly they are of its chunks, one each; where few lines hold all that can
be kept, of these lines. `slots` says to which chunk a list belongs; lists are in the order of the
chunks. Bounds are weights as bits: what is listed is `low` and more and less than `high`; what a
chunk has from `high` on is kept whatever else is, and summed. Lists of chunks are at first of
numbers as the row has them, from `low` on: they are weighed, and left to what lies below `high`,
when all are there. Where many numbers are larger, they are weighed before they are listed.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.few import list_few
from cairn.ops.sampling.kernels.filters import (
    added,
    bits_of,
    compact,
    limit,
    load_head,
    weight_of,
)
from cairn.ops.sampling.kernels.tuples import with_one_more


@triton.jit
def reached_by(key, wanted, enough):
    """A number that `wanted` of key [N] int32 >= 0 reach, and not more than `enough` of them, but
    for equal ones."""
    low = 0
    high = tl.max(key, 0) + 1
    reach = enough + 1
    # Most rows' numbers lie within 4 powers of two of the largest, or 16: weights as bits.
    one = tl.maximum(high - (16 << 23), 1)
    two = tl.maximum(high - (4 << 23), 1)
    while (high - low > 1) & (reach > enough):
        # Two counts in one sum.
        found = tl.sum((key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 16), 0)
        by_one, by_two = (found & 0xFFFF) >= wanted, (found >> 16) >= wanted
        high = tl.where(by_two, high, tl.where(by_one, two, one))
        low = tl.where(by_two, two, tl.where(by_one, one, low))
        reach = tl.where(by_two, found >> 16, tl.where(by_one, found & 0xFFFF, reach))
        one = low + tl.maximum((high - low) // 3, 1)
        two = tl.minimum(one + tl.maximum((high - low) // 3, 1), high - 1)
    return low


@triton.jit
def wanted_of(share, total, SHARE: tl.constexpr):
    """The sum up to which a row without a top k keeps weights: the largest whatever the share."""
    wanted = share.to(tl.float64)
    if SHARE > 0:
        wanted *= total
    return tl.maximum(wanted, 1e-300)


@triton.jit
def load_tops(tops, row, lines, N: tl.constexpr):
    """The maxima of a row's lines [N]; -inf beyond the last."""
    i = tl.arange(0, N)
    return tl.load(tops + row * lines + i, mask=i < lines, other=float("-inf"))


@triton.jit
def keys_of(top, peak, heat, lines, SOFTMAX: tl.constexpr):
    """The largest weights of a row's lines as bits, of `load_tops`; 0 beyond the last."""
    inside = tl.arange(0, top.shape[0]) < lines
    return tl.where(inside, bits_of(tl.maximum(weight_of(top, peak, heat, SOFTMAX), 0.0)), 0)


@triton.jit
def tally_of(near, one, two, three):
    """The sums, float32, of what of near [N] reaches each of three numbers, all as bits; and how
    many reach the second and the third."""
    first, second, third = near >= one, near >= two, near >= three
    value = near.to(tl.float32, bitcast=True)
    by_one, by_two = tl.where(first, value, 0.0), tl.where(second, value, 0.0)
    # Two counts in one sum.
    found = second.to(tl.int32) + (third.to(tl.int32) << 16)
    by_one, by_two, by_three, found = tl.reduce(
        (by_one, by_two, tl.where(third, value, 0.0), found), 0, added
    )
    return by_one, by_two, by_three, found & 0xFFFF, found >> 16


@triton.jit
def largest_of(near, floor, end, share, wanted, CHUNKS: tl.constexpr, MOST: tl.constexpr):
    """A weight, as bits, that all which is kept of a row without a top k reaches, and a number that
    the lines which reach it do not exceed: CHUNKS or less, if that is found, or not much more than
    it takes. More than MOST if it takes more, or the lines' largest weights do not tell.

    near: `keys_of` the row's lines, below end; floor: what surely is reached; wanted: of the row's
    sum.
    """
    low, high = floor, end
    found, beyond = tl.full([], MOST + 1, tl.int32), tl.full([], 0, tl.int32)
    # Most rows' numbers lie within 4 powers of two of the largest, or 16: weights as bits.
    one, two = floor, tl.minimum(tl.maximum(end - (16 << 23), floor), end - 1)
    three = tl.minimum(tl.maximum(end - (4 << 23), floor), end - 1)
    # Sums are in float32.
    enough = (wanted * 1.00001).to(tl.float32)
    missing = share < 1.0
    if not missing:
        found = tl.sum((near >= floor).to(tl.int32), 0)
    while missing:
        m_one, m_two, m_three, n_two, n_three = tally_of(near, one, two, three)
        by_one, by_two, by_three = m_one >= enough, m_two >= enough, m_three >= enough
        high = tl.where(by_one, tl.where(by_two, tl.where(by_three, high, three), two), one)
        beyond = tl.where(by_two, tl.where(by_three, beyond, n_three), tl.maximum(beyond, n_two))
        low = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
        found = tl.where(by_three, n_three, tl.where(by_two, n_two, found))
        step = tl.maximum((high - low) >> 2, 1)
        one, two, three = low + step, low + 2 * step, low + 3 * step
        missing = (found > CHUNKS) & (beyond <= MOST) & (found - beyond > found // 8)
        missing = missing & (high - low > 1)
    return low, found


@triton.jit
def floor_of(
    near, peak, heat, total, count, share, least, width, lines,
    CHUNKS: tl.constexpr, SOFTMAX: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """A weight, as bits, that all weights which the row's filters keep reach, and few others: of
    CHUNKS lines at most, if that is possible. near: `keys_of` the row's lines, where count > 0."""
    floor = weight_of(peak, peak, heat, SOFTMAX) * least
    if count > 0:
        # A share of the top k's sum takes all of them.
        floor = tl.where(share < 1.0, 0.0, floor)
        if near is not None:  # noqa: SIM102
            if count <= lines:
                # So few that CHUNKS lists hold their lines, if that is possible, but not one more
                # step than that takes.
                enough = tl.maximum(count + count // 8, tl.minimum(count + count // 4 + 4, CHUNKS))
                bound = reached_by(near, count, enough)
                floor = tl.maximum(floor, bound.to(tl.float32, bitcast=True))
    elif share < 1.0:
        # Weights below (total - wanted) / width sum up to less than total - wanted, so the
        # others reach what is wanted; half of that, and less still, leaves room to round.
        spare = (total * (1.0 - 1e-5) - wanted_of(share, total, SHARE)) * 0.5 / width
        floor = tl.maximum(floor, tl.maximum(spare, 0.0).to(tl.float32))
    return bits_of(floor)


@triton.jit
def sample_of(
    x, peak, heat, width, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The first SAMPLE weights of every chunk of a row at x, as parts of its largest, and how many
    numbers of the row each stands for."""
    i = tl.arange(0, CHUNKS * SAMPLE)
    place = i // SAMPLE * CHUNK + i % SAMPLE
    inside = place < width
    # With a mask, each load would wait for the one before.
    value = tl.load(x + tl.minimum(place, width - 1)).to(tl.float32)
    weight = weight_of(value, peak, heat, SOFTMAX)
    if not SOFTMAX:
        weight /= peak
    last = (width - 1) // CHUNK
    stands_for = width / (last * SAMPLE + tl.minimum(width - last * CHUNK, SAMPLE)).to(tl.float32)
    return tl.where(inside, weight, 0.0), stands_for


@triton.jit
def both_added(a, b, c, d):
    """Two pairs, number by number."""
    return a + c, b + d


@triton.jit
def sides_of(weight, stands_for, trial, top, spare, SURE: tl.constexpr):
    """Whether all weights below each trial [N], as bits, surely sum up to less than `spare`, and
    whether surely to more: by SURE standard deviations of what a sample tells.

    weight, stands_for: of `sample_of`; spare: a part of the largest weight, `top`.
    """
    bound = trial.to(tl.float32, bitcast=True) / top
    below = tl.where(weight[None, :] < bound[:, None], weight[None, :], 0.0)
    total, squares = tl.reduce((below, below * below), 1, both_added)
    # As if there were one more: who sees nothing cannot be sure of it.
    off = SURE * tl.sqrt(squares + bound * bound)
    return (total + off) * stands_for <= spare, (total - off) * stands_for >= spare


@triton.jit
def guess_of(weight, stands_for, spare, top, floor, end, SURE: tl.constexpr, TRIALS: tl.constexpr):
    """Bounds, as bits, between which the sum of all weights below surely gets to `spare`, or floor
    and end; of TRIALS between these, and then twice of as many next to what is found, half of them
    for each bound. The rest: of `sides_of`."""
    j = tl.arange(0, TRIALS)
    HALF: tl.constexpr = TRIALS // 2
    low, high = floor, end
    step = (end - floor) // TRIALS + 1
    trial = floor + j * step
    for _ in range(3):
        less, more = sides_of(weight, stands_for, trial, top, spare, SURE)
        low = tl.maximum(low, tl.max(tl.where(less, trial, floor), 0))
        high = tl.minimum(high, tl.min(tl.where(more, trial, end), 0))
        step = step // HALF + 1
        trial = tl.where(j < HALF, low + j * step, high - (j - HALF) * step)
    low = tl.minimum(low, end - 1)
    return low, tl.maximum(high, low + 1)


@triton.jit
def bound_of(low, heat, SOFTMAX: tl.constexpr):
    """From where on numbers may weigh `low` or more, as bits: all that do are, as `height_of`."""
    weight = low.to(tl.float32, bitcast=True)
    bound = weight
    if SOFTMAX:
        # More than powers and logarithms are off by; below normal numbers weights are rounded.
        bound = (tl.log2(weight) - 1e-3) / tl.div_rn(1.4426950408889634, heat)
        bound = tl.where(low < (1 << 23), float("-inf"), bound)
    return bound


@triton.jit
def height_of(value, peak, SOFTMAX: tl.constexpr):
    """What weights follow from: how far logits lie from the largest, or probabilities."""
    return value - peak if SOFTMAX else value


@triton.jit
def list_chunk(
    numbers, counts, values, first, bound, peak, COUNT: tl.constexpr, SOFTMAX: tl.constexpr
):
    """Write those of a chunk's numbers that are listed, from `bound` of `height_of` on, line by
    line, and how many. The chunk is COUNT of the values from the first on, each [LINES] float32,
    one of each line: nothing but a running sum of lines goes from thread to thread."""
    each = tl.zeros(values[first].shape, tl.int32)
    for n in tl.static_range(COUNT):
        each += (height_of(values[first + n], peak, SOFTMAX) >= bound).to(tl.int32)
    running = tl.cumsum(each, 0)
    at = numbers + running - each
    for n in tl.static_range(COUNT):
        listed = height_of(values[first + n], peak, SOFTMAX) >= bound
        tl.store(at, values[first + n], mask=listed)
        at += listed.to(tl.int32)
    line = tl.arange(0, running.shape[0])
    tl.store(counts + line * 0, running, mask=line == running.shape[0] - 1)


@triton.jit
def weigh_chunk(
    weights, counts, sums, values, first, low, high, peak, heat,
    CHUNKS: tl.constexpr, COUNT: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """`list_chunk` of its weights from `low` up to `high`; sums [2, CHUNKS] float64: what the chunk
    has from there on, and what is listed."""
    above = tl.zeros(values[first].shape, tl.float64)
    among = tl.zeros(values[first].shape, tl.float64)
    each = tl.zeros(values[first].shape, tl.int32)
    weighed = ()
    for n in tl.static_range(COUNT):
        weight = weight_of(values[first + n], peak, heat, SOFTMAX)
        wide = weight.to(tl.float64)
        listed = (bits_of(weight) >= low) & (bits_of(weight) < high)
        above += tl.where(bits_of(weight) >= high, wide, 0.0)
        among += tl.where(listed, wide, 0.0)
        each += listed.to(tl.int32)
        weighed = with_one_more(weighed, weight)
    running = tl.cumsum(each, 0)
    at = weights + running - each
    for n in tl.static_range(COUNT):
        listed = (bits_of(weighed[n]) >= low) & (bits_of(weighed[n]) < high)
        tl.store(at, weighed[n], mask=listed)
        at += listed.to(tl.int32)
    line = tl.arange(0, running.shape[0])
    tl.store(counts + line * 0, running, mask=line == running.shape[0] - 1)
    above, among = tl.reduce((above, among), 0, both_added)
    tl.store(sums, above)
    tl.store(sums + CHUNKS, among)


@triton.jit
def keep_hits(hit, counts, CHUNKS: tl.constexpr):
    """Leave the numbers of the lines that are hit in the slots behind the lists' counts, in order;
    the lists are empty. How many they are."""
    c = tl.arange(0, CHUNKS)
    order = tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(counts + c, c * 0)
    tl.store(counts + CHUNKS + order, tl.arange(0, hit.shape[0]), mask=hit)
    tl.debug_barrier()
    return tl.sum(hit.to(tl.int32), 0)


@triton.jit
def place_of(line, i, CHUNK: tl.constexpr, LINE: tl.constexpr):
    """The place in a row of the i-th number of a line, as in `store_tops`."""
    lines: tl.constexpr = CHUNK // LINE
    run: tl.constexpr = LINE // 4
    return line // lines * CHUNK + line % lines * run + i // run * (lines * run) + i % run


@triton.jit
def list_lines(weights, counts, s, weight, listed, CHUNK: tl.constexpr):
    """Write those of the lines' weights [N, LINE] that are listed into lists s [N], and how
    many."""
    listed = listed.to(tl.int32)
    order = tl.cumsum(listed, 1) - 1
    tl.store(weights + s[:, None] * CHUNK + order, weight, mask=listed > 0)
    tl.store(counts + s, tl.sum(listed, 1))


@triton.jit
def name_chunks(slots, found, CHUNKS: tl.constexpr, LINES: tl.constexpr):
    """From lines in the lists' slots to their chunks, of LINES lines each."""
    s = tl.arange(0, CHUNKS)
    tl.debug_barrier()
    line = tl.load(slots + s, mask=s < found, other=0)
    # All have read before any writes.
    tl.debug_barrier()
    tl.store(slots + s, line // LINES)


@triton.jit
def load_lines(
    x, slots, s, i, found, low, peak, heat, width,
    CHUNK: tl.constexpr, LINE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The i-th weights of the lines in slots s of a row at x, their places, and which are listed:
    those from `low` on."""
    line = tl.load(slots + s, mask=s < found, other=0)
    place = place_of(line[:, None], i, CHUNK, LINE)
    inside = (s < found)[:, None] & (place < width)
    value = tl.load(x + place, mask=inside, other=float("-inf"))
    weight = weight_of(value.to(tl.float32), peak, heat, SOFTMAX)
    return weight, place, (bits_of(weight) >= low) & (weight > 0.0)


@triton.jit
def collect_lines(
    x, counts, weights, few_keys, found, low, peak, heat, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, FEW: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Lists the weights of a row at x from `low` on, those of the `found` lines that slots name: as
    few ones, if there is room for these, or else in the slots' lists, if these are enough. How many
    they are, and the sum of what is in the slots' lists, float64."""
    slots = counts + CHUNKS
    # Halves of lines: a number for each thread of a warp.
    HALF: tl.constexpr = LINE // 2
    half = tl.arange(0, 2 * CHUNKS)
    i = half[:, None] % 2 * HALF + tl.arange(0, HALF)[None, :]
    total = tl.full([], 0, tl.int32)
    for begin in range(0, found, CHUNKS):
        weight, place, listed = load_lines(
            x, slots + begin, half // 2, i, found - begin, low, peak, heat, width,
            CHUNK, LINE, SOFTMAX,
        )  # fmt: skip
        total = list_few(few_keys, weight, place, listed, total, FEW)
    mass = tl.full([], 0.0, tl.float64)
    if (total > FEW) & (found <= CHUNKS):
        s = tl.arange(0, CHUNKS)
        whole, _place, among = load_lines(
            *(x, slots, s, tl.arange(0, LINE)[None, :], found, low, peak, heat, width),
            *(CHUNK, LINE, SOFTMAX),
        )
        list_lines(weights, counts, s, whole, among, CHUNK)
        name_chunks(slots, found, CHUNKS, CHUNK // LINE)
        mass = tl.sum(tl.sum(tl.where(among, whole, 0.0).to(tl.float64), 1), 0)
    return total, mass


@triton.jit
def load_chunks(
    x, chunk, step, width,
    CHUNK: tl.constexpr, LINES: tl.constexpr, ABREAST: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """ABREAST chunks of a row at x, each `step` behind the one before, in a tuple of [LINES]
    float32; -inf beyond the row. INSIDE: nothing is. What is found of them shall stay in the cache
    rather than they."""
    values = ()
    i = tl.arange(0, LINES)
    for n in tl.static_range(ABREAST):
        begin = (chunk + n * step) * CHUNK
        at = x + begin + i
        for k in tl.static_range(CHUNK // LINES):
            if INSIDE:
                value = tl.load(at + k * LINES, eviction_policy="evict_first")
            else:
                inside = i < width - begin - k * LINES
                value = tl.load(
                    at + k * LINES, mask=inside, other=float("-inf"), eviction_policy="evict_first"
                )
            values = with_one_more(values, value.to(tl.float32))
    return values


@triton.jit
def load_abreast(
    x, chunk, step, width, CHUNK: tl.constexpr, LINES: tl.constexpr, ABREAST: tl.constexpr
):
    """`load_chunks`, some of which may lie beyond the row."""
    # Where every load has a branch of its own, each waits for the one before.
    if (chunk + (ABREAST - 1) * step + 1) * CHUNK <= width:
        values = load_chunks(x, chunk, step, width, CHUNK, LINES, ABREAST, True)
    else:
        values = load_chunks(x, chunk, step, width, CHUNK, LINES, ABREAST, False)
    return values


@triton.jit
def collect_chunks(
    x, counts, numbers, low, peak, heat, width, chunks, first, step,
    CHUNK: tl.constexpr, LINES: tl.constexpr, ABREAST: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Lists the numbers of every step-th chunk of a row at x that weigh `low` > 0 or more, and
    maybe some others. ABREAST: so many chunks are on their way at a time."""
    bound = bound_of(low, heat, SOFTMAX)
    COUNT: tl.constexpr = CHUNK // LINES
    for begin in range(first, chunks, ABREAST * step):
        values = load_abreast(x, begin, step, width, CHUNK, LINES, ABREAST)
        for n in tl.static_range(ABREAST):
            chunk = begin + n * step
            if chunk < chunks:
                list_chunk(
                    numbers + chunk * CHUNK, counts + chunk, values, n * COUNT, bound, peak,
                    COUNT, SOFTMAX,
                )  # fmt: skip


@triton.jit
def weigh_chunks(
    x, counts, weights, sums, low, high, peak, heat, width, chunks, first, step,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINES: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Lists the weights of every step-th chunk of a row at x from `low` > 0 up to `high`; sums
    [2, CHUNKS]: of `weigh_chunk`."""
    for chunk in range(first, chunks, step):
        # With more of them on their way, their weights would not fit the registers.
        values = load_abreast(x, chunk, step, width, CHUNK, LINES, 1)
        weigh_chunk(
            weights + chunk * CHUNK, counts + chunk, sums + chunk, values, 0, low, high, peak, heat,
            CHUNKS, CHUNK // LINES, SOFTMAX,
        )  # fmt: skip


@triton.jit
def weigh_lists(
    weights, counts, sums, many, low, high, peak, heat, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Make lists of numbers those of their weights from `low` up to `high`; of `many` they are. Of
    each chunk the sum above, float64, and of the row the sum of that with what is listed. sums: of
    `weigh_chunks`."""
    c = tl.arange(0, CHUNKS)
    if many:
        above = tl.load(sums + c, mask=c < chunks, other=0.0)
        among = tl.load(sums + CHUNKS + c, mask=c < chunks, other=0.0)
    else:
        count = tl.load(counts + c)
        left, above, among = compact(
            weights, count, tl.max(count, 0), low, high, peak, heat, CHUNK, WIDTH, SOFTMAX
        )
        tl.store(counts + c, left)
    return above, tl.sum(above + among, 0)


@triton.jit
def of_chunks(value, slot):
    """The sum of lists' values [CHUNKS] of each chunk, whose numbers are slot [CHUNKS]."""
    own = slot[:, None] == tl.arange(0, slot.shape[0])[None, :]
    return tl.sum(tl.where(own, value[:, None], 0), 0)


@triton.jit
def limit_of(
    counts, weights, by_line, above, reached, top, low, high, k, share, least, total,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """`limit` of a row with lists, sums and numbers per chunk. by_line: lists are not of the chunks
    in their order; above, reached: of `weigh_lists`."""
    c = tl.arange(0, CHUNKS)
    count = tl.load(counts + c)
    head = load_head(weights, count, CHUNK, WIDTH)
    threshold, mass, taken, partly = limit(
        weights, head, count, above, reached, top, low, high, k, share, least, total, SHARE, CHUNK
    )
    if by_line:
        slot = tl.load(counts + CHUNKS + c)
        mass, taken = of_chunks(mass, slot), of_chunks(taken, slot)
    return threshold, mass, taken, partly


@triton.jit
def last_taken(
    x, threshold, taken, peak, heat, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The place of the last weight of a row at x that is taken of those equal to the threshold;
    taken [CHUNKS] says how many of each chunk are, the first ones."""
    c = tl.arange(0, CHUNKS)
    chunk = tl.max(tl.where(taken > 0, c, 0), 0)
    few = tl.sum(tl.where(c == chunk, taken, 0), 0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + place, mask=place < width, other=0.0).to(tl.float32)
    equal = (bits_of(weight_of(value, peak, heat, SOFTMAX)) == threshold) & (place < width)
    first = equal & (tl.cumsum(equal.to(tl.int32), 0) <= few)
    return tl.max(tl.where(first, place, -1), 0)
