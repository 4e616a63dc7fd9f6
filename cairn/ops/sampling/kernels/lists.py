"""Lists of the weights of a row among which a filter's threshold lies: see `filters`.

A row has CHUNKS lists. Mostly they are of its chunks, one each; where few lines hold all that can
be kept, of these lines. `slots` says to which chunk a list belongs; lists are in the order of the
chunks. Bounds are weights as bits: what is listed is `low` and more and less than `high`; what a
chunk has from `high` on is kept whatever else is, and summed.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.few import list_few
from cairn.ops.sampling.kernels.filters import bits_of, limit, load_head, weight_of


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
    """The sum up to which a row without a top k keeps weights."""
    wanted = share.to(tl.float64)
    if SHARE > 0:
        wanted *= total
    return wanted


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
def between(
    marked, row, chunk_top, scale, mass, top, floor, end, wanted, total, chunks,
    MARKS: tl.constexpr, STEP: tl.constexpr, TRIALS: tl.constexpr,
):  # fmt: skip
    """The bounds, as bits, among TRIALS weights between which a sum from the largest weight down
    gets to what is wanted, or else floor and end.

    Args:
        marked: of `survey_kernel`; chunk_top: the chunks' largest weights, as parts of the row's;
            scale, mass: of `summary_of`; top: the row's largest weight.
    """
    c = tl.arange(0, scale.shape[0])[:, None]
    trial = tl.arange(0, TRIALS)
    # How many marks of a chunk lie above a trial, each STEP powers of two below the last.
    steps = tl.log2(chunk_top)[:, None] / STEP + trial.to(tl.float32)[None, :]
    # Rounded such that a chunk has no more than `most`, and no less than `least`.
    more = tl.floor(steps + 1e-3).to(tl.int32) + 1
    less = tl.minimum(tl.floor(steps - 1e-3).to(tl.int32), MARKS)
    at = marked + (row * chunks + c) * MARKS - 1
    known = (more >= 1) & (more <= MARKS) & (c < chunks)
    most = tl.load(at + more, mask=known, other=0.0).to(tl.float64) * scale[:, None]
    most = tl.where(more > MARKS, mass[:, None], most)
    some = (less >= 1) & (c < chunks)
    least = tl.load(at + less, mask=some, other=0.0).to(tl.float64) * scale[:, None]
    # More than sums in float32 can be off.
    room = total * 1e-4
    weight = bits_of(top * tl.exp2(-STEP * trial.to(tl.float32)))
    low = tl.max(tl.where(tl.sum(least, 0) >= wanted + room, weight, floor), 0)
    high = tl.min(tl.where(tl.sum(most, 0) < wanted - room, weight, end), 0)
    low = tl.maximum(low, floor)
    # What reaches the floor may be less than is wanted: then all of it is kept.
    return low, tl.maximum(high, low + 1)


@triton.jit
def square_of(chunk, CHUNK: tl.constexpr):
    """Places of a chunk's numbers, [16, CHUNK / 16]: a thread holds a column or several."""
    lines: tl.constexpr = CHUNK // 16
    return chunk * CHUNK + tl.arange(0, 16)[:, None] * lines + tl.arange(0, lines)[None, :]


@triton.jit
def list_chunk(weights, counts, weight, listed):
    """Write those of a chunk's weights, as of `square_of`, that are listed, column by column, and
    how many they are."""
    listed = listed.to(tl.int32)
    each = tl.sum(listed, 0)
    before = tl.cumsum(each, 0) - each
    place = before[None, :] + tl.cumsum(listed, 0) - 1
    tl.store(weights + place, weight, mask=listed > 0)
    tl.store(counts, tl.sum(each, 0))


@triton.jit
def keep_hits(hit, counts, CHUNKS: tl.constexpr):
    """Leave the numbers of the lines that are hit, CHUNKS at most, in the lists' slots, in order;
    the lists are empty."""
    c = tl.arange(0, CHUNKS)
    order = tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(counts + c, c * 0)
    tl.store(counts + CHUNKS + order, tl.arange(0, hit.shape[0]), mask=hit)
    tl.debug_barrier()


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
    few ones, if there is room for these, or else in the slots' lists. How many the few are, more
    than FEW if they are in the slots' lists."""
    slots = counts + CHUNKS
    # Halves of lines: a number for each thread of a warp.
    HALF: tl.constexpr = LINE // 2
    half = tl.arange(0, 2 * CHUNKS)
    i = half[:, None] % 2 * HALF + tl.arange(0, HALF)[None, :]
    weight, place, listed = load_lines(
        x, slots, half // 2, i, found, low, peak, heat, width, CHUNK, LINE, SOFTMAX
    )
    total = list_few(few_keys, weight, place, listed, FEW)
    if total > FEW:
        s = tl.arange(0, CHUNKS)
        whole, _place, among = load_lines(
            *(x, slots, s, tl.arange(0, LINE)[None, :], found, low, peak, heat, width),
            *(CHUNK, LINE, SOFTMAX),
        )
        list_lines(weights, counts, s, whole, among, CHUNK)
        name_chunks(slots, found, CHUNKS, CHUNK // LINE)
    return total


@triton.jit
def collect_chunks(
    x, counts, aboves, weights, low, high, peak, heat, width, chunks,
    CHUNK: tl.constexpr, SOFTMAX: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Lists the weights of a program's chunks of a row at x from `low` up to `high`; WEIGHED: the
    sums of the others above too."""
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        place = square_of(chunk, CHUNK)
        value = tl.load(x + place, mask=place < width, other=float("-inf"))
        weight = weight_of(value.to(tl.float32), peak, heat, SOFTMAX)
        key = bits_of(weight)
        listed = (key >= low) & (key < high) & (weight > 0.0)
        list_chunk(weights + chunk * CHUNK, counts + chunk, weight, listed)
        if WEIGHED:
            tl.store(aboves + chunk, tl.sum(tl.where(key >= high, weight, 0.0).to(tl.float64)))


@triton.jit
def of_chunks(value, slot):
    """The sum of lists' values [CHUNKS] of each chunk, whose numbers are slot [CHUNKS]."""
    own = slot[:, None] == tl.arange(0, slot.shape[0])[None, :]
    return tl.sum(tl.where(own, value[:, None], 0), 0)


@triton.jit
def limit_of(
    bounds, counts, aboves, weights, row, top, k, share, least, total,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """`limit` of a row with lists, sums and numbers per chunk."""
    c = tl.arange(0, CHUNKS)
    weights += row * CHUNKS * CHUNK
    count = tl.load(counts + row * 2 * CHUNKS + c)
    slot = tl.load(counts + row * 2 * CHUNKS + CHUNKS + c)
    above = tl.load(aboves + row * CHUNKS + c)
    head = load_head(weights, count, CHUNK, WIDTH)
    threshold, mass, taken, partly = limit(
        weights, head, count, above, top, tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1),
        k, share, least, total, SHARE, CHUNK,
    )  # fmt: skip
    return threshold, of_chunks(mass, slot), of_chunks(taken, slot), partly


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
