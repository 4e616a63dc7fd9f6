"""Lists of the weights of a row among which a filter's threshold lies: see `filters`.

A row has CHUNKS lists: usually one per chunk; where at most CHUNKS lines hold all that can be kept,
one per such line. `slots` maps a list to its chunk; lists are in the order of the chunks. A list
holds the weights in [low, high), compared as bits; weights >= high are kept in any case, and only
their sum is stored. Lists of chunks first hold raw values from `low` on; when all are complete,
they are converted to weights and those >= high are removed. Where many values are >= low, weights
are computed before they are listed.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.bounds import both_added, bound_of, height_of
from cairn.ops.sampling.kernels.few import list_few
from cairn.ops.sampling.kernels.filters import bits_of, compact, limit, load_head, weight_of
from cairn.ops.sampling.kernels.tuples import appended


@triton.jit
def write_list(out, counts, values, hits):
    """Store the values, a tuple of [LINES] float32, where hits is set, in thread order, and their
    number. Only a running sum of per-thread counts crosses threads."""
    each = tl.zeros(values[0].shape, tl.int32)
    for n in tl.static_range(len(values)):
        each += hits[n].to(tl.int32)
    running = tl.cumsum(each, 0)
    at = out + running - each
    for n in tl.static_range(len(values)):
        tl.store(at, values[n], mask=hits[n])
        at += hits[n].to(tl.int32)
    line = tl.arange(0, running.shape[0])
    tl.store(counts + line * 0, running, mask=line == running.shape[0] - 1)


@triton.jit
def list_chunk(
    numbers, counts, values, first, bound, peak, COUNT: tl.constexpr, SOFTMAX: tl.constexpr
):
    """`write_list` of a chunk's values whose `height_of` is >= bound. The chunk is the COUNT values
    from index `first` on."""
    own, hits = (), ()
    for n in tl.static_range(COUNT):
        own = appended(own, values[first + n])
        hits = appended(hits, height_of(values[first + n], peak, SOFTMAX) >= bound)
    write_list(numbers, counts, own, hits)


@triton.jit
def weigh_chunk(
    weights, counts, sums, values, low, high, peak, temp,
    CHUNKS: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """`write_list` of the weights of a chunk in [low, high); sums [2, CHUNKS] float64: the chunk's
    sum of weights >= high, and of those listed."""
    above = tl.zeros(values[0].shape, tl.float64)
    among = tl.zeros(values[0].shape, tl.float64)
    own, hits = (), ()
    for n in tl.static_range(len(values)):
        weight = weight_of(values[n], peak, temp, SOFTMAX)
        wide = weight.to(tl.float64)
        hit = (bits_of(weight) >= low) & (bits_of(weight) < high)
        above += tl.where(bits_of(weight) >= high, wide, 0.0)
        among += tl.where(hit, wide, 0.0)
        own, hits = appended(own, weight), appended(hits, hit)
    write_list(weights, counts, own, hits)
    above, among = tl.reduce((above, among), 0, both_added)
    tl.store(sums, above)
    tl.store(sums + CHUNKS, among)


@triton.jit
def keep_hits(hit, counts, CHUNKS: tl.constexpr):
    """Empty the row's lists and store the indices of the lines with `hit` set, in order, in the
    slots after the lists' counts. Returns their number."""
    c = tl.arange(0, CHUNKS)
    order = tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(counts + c, c * 0)
    tl.store(counts + CHUNKS + order, tl.arange(0, hit.shape[0]), mask=hit)
    tl.debug_barrier()
    return tl.sum(hit.to(tl.int32), 0)


@triton.jit
def place_of(line, i, CHUNK: tl.constexpr, LINE: tl.constexpr):
    """The place in the row of element i of a line, laid out as in `store_tops`."""
    lines: tl.constexpr = CHUNK // LINE
    run: tl.constexpr = LINE // 4
    return line // lines * CHUNK + line % lines * run + i // run * (lines * run) + i % run


@triton.jit
def list_lines(weights, counts, s, weight, listed, CHUNK: tl.constexpr):
    """Store the weights [N, LINE] with `listed` set into lists s [N], and their number."""
    listed = listed.to(tl.int32)
    order = tl.cumsum(listed, 1) - 1
    tl.store(weights + s[:, None] * CHUNK + order, weight, mask=listed > 0)
    tl.store(counts + s, tl.sum(listed, 1))


@triton.jit
def name_chunks(slots, found, CHUNKS: tl.constexpr, LINES: tl.constexpr):
    """Replace the line index in each list's slot by the index of its chunk, which has LINES
    lines."""
    s = tl.arange(0, CHUNKS)
    tl.debug_barrier()
    line = tl.load(slots + s, mask=s < found, other=0)
    # All threads have loaded before any stores.
    tl.debug_barrier()
    tl.store(slots + s, line // LINES)


@triton.jit
def load_lines(
    x, slots, s, i, found, low, peak, temp, width,
    CHUNK: tl.constexpr, LINE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """(Elements i of the lines in slots s, as weights; their places; whether they are >= low and >
    0.)"""
    line = tl.load(slots + s, mask=s < found, other=0)
    place = place_of(line[:, None], i, CHUNK, LINE)
    inside = (s < found)[:, None] & (place < width)
    value = tl.load(x + place, mask=inside, other=float("-inf"))
    weight = weight_of(value.to(tl.float32), peak, temp, SOFTMAX)
    return weight, place, (bits_of(weight) >= low) & (weight > 0.0)


@triton.jit
def collect_lines(
    x, counts, weights, few_keys, found, low, peak, temp, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, FEW: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    """List the weights >= low of the `found` lines in the row's slots: as keys in `few_keys`, if
    they are FEW at most; else in the row's lists, if there are enough of these. Returns (their
    number, the sum of those in the row's lists, float64)."""
    slots = counts + CHUNKS
    # Half a line gives each thread of a warp one value.
    HALF: tl.constexpr = LINE // 2
    half = tl.arange(0, 2 * CHUNKS)
    i = half[:, None] % 2 * HALF + tl.arange(0, HALF)[None, :]
    total = tl.full([], 0 if FEW > 0 else 1, tl.int32)
    if FEW > 0:
        for begin in range(0, found, CHUNKS):
            weight, place, listed = load_lines(
                x, slots + begin, half // 2, i, found - begin, low, peak, temp, width,
                CHUNK, LINE, SOFTMAX,
            )  # fmt: skip
            total = list_few(few_keys, weight, place, listed, total, FEW)
    mass = tl.full([], 0.0, tl.float64)
    if (total > FEW) & (found <= CHUNKS):
        s = tl.arange(0, CHUNKS)
        whole, _place, among = load_lines(
            x,
            slots,
            s,
            tl.arange(0, LINE)[None, :],
            found,
            low,
            peak,
            temp,
            width,
            CHUNK,
            LINE,
            SOFTMAX,
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
    """ABREAST chunks of a row at x, `step` chunks apart, as a tuple of [LINES] float32, padded with
    -inf. INSIDE: no padding is needed. Loaded with evict_first, so that the lists made of them stay
    in L2."""
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
            values = appended(values, value.to(tl.float32))
    return values


@triton.jit
def load_abreast(
    x, chunk, step, width, CHUNK: tl.constexpr, LINES: tl.constexpr, ABREAST: tl.constexpr
):
    """`load_chunks` with INSIDE decided at run time."""
    # One branch for all loads: with a branch each, every load would wait for the one before.
    if (chunk + (ABREAST - 1) * step + 1) * CHUNK <= width:
        values = load_chunks(x, chunk, step, width, CHUNK, LINES, ABREAST, True)
    else:
        values = load_chunks(x, chunk, step, width, CHUNK, LINES, ABREAST, False)
    return values


@triton.jit
def collect_chunks(
    x, counts, numbers, low, peak, temp, width, chunks, first, step,
    CHUNK: tl.constexpr, LINES: tl.constexpr, ABREAST: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """List the values of every step-th chunk of a row at x whose weight may be >= low > 0. ABREAST:
    chunks loaded at a time."""
    bound = bound_of(low, temp, SOFTMAX)
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
    x, counts, weights, sums, low, high, peak, temp, width, chunks, first, step,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINES: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """List the weights in [low, high), low > 0, of every step-th chunk of a row at x; sums: as
    written by `weigh_chunk`."""
    for chunk in range(first, chunks, step):
        # One chunk at a time: weights of several would not fit into registers.
        values = load_abreast(x, chunk, step, width, CHUNK, LINES, 1)
        weigh_chunk(
            weights + chunk * CHUNK, counts + chunk, sums + chunk, values, low, high, peak, temp,
            CHUNKS, SOFTMAX,
        )  # fmt: skip


@triton.jit
def weigh_lists(
    weights, counts, sums, many, low, high, peak, temp, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Convert lists of values to lists of their weights in [low, high); with `many` they are that
    already. Returns (per chunk the sum of weights >= high, float64; the row's sum of these and of
    all listed). sums: as written by `weigh_chunks`."""
    c = tl.arange(0, CHUNKS)
    if many:
        above = tl.load(sums + c, mask=c < chunks, other=0.0)
        among = tl.load(sums + CHUNKS + c, mask=c < chunks, other=0.0)
    else:
        count = tl.load(counts + c)
        left, above, among = compact(
            weights, count, tl.max(count, 0), low, high, peak, temp, CHUNK, WIDTH, SOFTMAX
        )
        tl.store(counts + c, left)
    return above, tl.sum(above + among, 0)


@triton.jit
def of_chunks(value, slot):
    """Sum the lists' values [CHUNKS] per chunk; slot [CHUNKS]: the chunk of each list."""
    own = slot[:, None] == tl.arange(0, slot.shape[0])[None, :]
    return tl.sum(tl.where(own, value[:, None], 0), 0)


@triton.jit
def limit_of(
    counts, weights, by_line, above, reached, top, low, high, k, share, least, total,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """`limit` of a row, with sums and counts per chunk. by_line: lists are those of lines; above,
    reached: as returned by `weigh_lists`."""
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
    x, threshold, taken, peak, temp, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The place in a row at x of the last kept weight among those equal to the threshold; taken
    [CHUNKS]: how many of each chunk are kept, the first ones."""
    c = tl.arange(0, CHUNKS)
    chunk = tl.max(tl.where(taken > 0, c, 0), 0)
    few = tl.sum(tl.where(c == chunk, taken, 0), 0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + place, mask=place < width, other=0.0).to(tl.float32)
    equal = (bits_of(weight_of(value, peak, temp, SOFTMAX)) == threshold) & (place < width)
    first = equal & (tl.cumsum(equal.to(tl.int32), 0) <= few)
    return tl.max(tl.where(first, place, -1), 0)
