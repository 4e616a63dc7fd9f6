"""Lists of the weights near the threshold of filtered rows, see `lists`, and the tokens drawn from
them."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous
from cairn.ops.sampling.kernels.bounds import (
    floor_by_lines,
    floor_of,
    guess_of,
    keys_of,
    load_tops,
    sample_of,
    wanted_of,
)
from cairn.ops.sampling.kernels.draw import draw_listed, draw_plain
from cairn.ops.sampling.kernels.few import draw_few
from cairn.ops.sampling.kernels.filters import (
    bits_of,
    filters_of,
    number_of,
    summary_of,
    temperature_of,
    weight_of,
)
from cairn.ops.sampling.kernels.lists import (
    collect_chunks,
    collect_lines,
    keep_hits,
    weigh_chunks,
    weigh_lists,
)
from cairn.ops.sampling.kernels.uniform import fraction_of


@triton.jit
def draw_from_lines(
    x, line_keys, counts, weights, few_keys, few_weights, low, peak, temp, count, share, least, top,
    total, fraction, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, FEW: tl.constexpr,
    SLICE: tl.constexpr, SOFTMAX: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row at x whose kept weights all lie in the lines with a maximum >= low.
    Returns (the token, or -2 where more than FEW weights are listed or FEW = 0; whether they are in
    the row's lists instead; their sum). line_keys: as returned by `keys_of`."""
    token = tl.full([], -2, tl.int32)
    found = keep_hits((line_keys >= low) & (line_keys > 0), counts, CHUNKS)
    several, reached = collect_lines(
        x, counts, weights, few_keys, found, low, peak, temp, width,
        CHUNKS, CHUNK, LINE, FEW, SOFTMAX,
    )  # fmt: skip
    if FEW > 0:  # noqa: SIM102
        if several <= FEW:
            token = draw_few(
                few_keys, few_weights, several, top, count, share, least, total, fraction,
                SHARE, FEW, SLICE,
            )  # fmt: skip
    return token, (several > FEW) & (found <= CHUNKS), reached


@triton.jit
def is_last(arrivals):
    """Whether all other programs of the row have arrived, so that their stores can be loaded."""
    # All threads' stores precede the arrival that one of them signals.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    tl.debug_barrier()
    return last


@triton.jit
def collect_between(
    x, counts, weights, sums, arrivals, alone, many, low, high, floor, end, wanted, peak, temp,
    width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINES: tl.constexpr, ABREAST: tl.constexpr,
    WIDTH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """List this program's chunks in [low, high), or all chunks if it is `alone`; many: most values
    are >= low, so weights are listed at once. The last program of the row to arrive sums up; if the
    threshold turns out to lie outside [low, high), it lists all chunks again between the other
    bounds, up to floor or end. Returns (whether this is the last program, the lists' bounds, and
    the results of `weigh_lists`)."""
    above, reached = tl.zeros([CHUNKS], tl.float64), tl.full([], 0.0, tl.float64)
    last = alone
    missing = tl.full([], True, tl.int1)
    while missing:
        first = tl.where(last, 0, tl.program_id(0))
        step = tl.where(last, 1, tl.num_programs(0))
        if many:
            weigh_chunks(
                x, counts, weights, sums, low, high, peak, temp, width, chunks, first, step,
                CHUNKS, CHUNK, LINES, SOFTMAX,
            )  # fmt: skip
        else:
            collect_chunks(
                x, counts, weights, low, peak, temp, width, chunks, first, step,
                CHUNK, LINES, ABREAST, SOFTMAX,
            )  # fmt: skip
        guessed = last == 0
        # Threads load what other threads of the program have stored.
        tl.debug_barrier()
        if guessed:
            last = is_last(arrivals)
        missing = tl.full([], False, tl.int1)
        if last:
            above, reached = weigh_lists(
                weights, counts, sums, many, low, high, peak, temp, chunks,
                CHUNKS, CHUNK, WIDTH, SOFTMAX,
            )  # fmt: skip
            if guessed:
                higher = (tl.sum(above, 0) >= wanted) & (high < end)
                lower = (reached < wanted) & (low > floor)
                missing = higher | lower
                low, high = (
                    tl.where(higher, high, tl.where(lower, floor, low)),
                    tl.where(higher, end, tl.where(lower, low, high)),
                )
    tl.debug_barrier()
    return last, low, high, above, reached


@triton.jit
def collect_row(
    x, line_maxima, counts, weights, sums, few_keys, few_weights, arrivals, peak, mass, temp,
    count, share, least, fraction, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    SAMPLE: tl.constexpr, SURE: tl.constexpr, TRIALS: tl.constexpr, FEW: tl.constexpr,
    SLICE: tl.constexpr, MAX_LINES: tl.constexpr, ABREAST: tl.constexpr, WIDTH: tl.constexpr,
    SOFTMAX: tl.constexpr, SHARE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """List the weights near the threshold of a filtered row at x, or draw its token at once;
    SHARED: top-p may be set. Returns (the token, or -2; whether this program found all lists
    complete; whether they are lists of lines; their bounds; the results of `weigh_lists`)."""
    total = tl.sum(mass, 0)
    top = weight_of(peak, peak, temp, SOFTMAX)
    lines = chunks * (CHUNK // LINE)
    line_keys = None
    if line_maxima is not None:
        line_keys = keys_of(line_maxima, peak, temp, lines, SOFTMAX)
    floor = floor_of(
        line_keys, peak, temp, total, count, share, least, width, lines, CHUNKS, SOFTMAX, SHARE
    )
    # Weights of 0 are never kept.
    floor, end = tl.maximum(floor, 1), bits_of(top) + 1
    low, high = floor, end
    wanted = wanted_of(share, total, SHARE)
    token = tl.full([], -2, tl.int32)
    by_line = count < 0
    done, alone = by_line, by_line
    above, reached = tl.zeros([CHUNKS], tl.float64), tl.full([], 0.0, tl.float64)
    if line_keys is not None:
        if count > 0:
            found = tl.sum(((line_keys >= low) & (line_keys > 0)).to(tl.int32), 0)
            by_line = (count <= lines) & (found <= CHUNKS)
        else:
            low, found = floor_by_lines(line_keys, floor, end, share, wanted, CHUNKS, MAX_LINES)
            by_line = found <= MAX_LINES
            low = tl.where(by_line, low, floor)
        if by_line & (tl.program_id(0) == 0):
            token, done, reached = draw_from_lines(
                x, line_keys, counts, weights, few_keys, few_weights, low, peak, temp, count, share,
                least, top, total, fraction, width,
                CHUNKS, CHUNK, LINE, FEW, SLICE, SOFTMAX, SHARE,
            )  # fmt: skip
            # The lists overflowed after all other programs had ended: this one finishes the row
            # alone.
            alone = (token == -2) & (done == 0)
            by_line = by_line & (alone == 0)
    if not by_line:
        many = by_line
        if SHARED:  # noqa: SIM102
            if (count == 0) & (share < 1.0) & (alone == 0):
                sample, stands_for = sample_of(x, peak, temp, width, CHUNKS, CHUNK, SAMPLE, SOFTMAX)
                spare = ((total - wanted) / top).to(tl.float32)
                low, high = guess_of(sample, stands_for, spare, top, floor, end, SURE, TRIALS)
                larger = tl.sum((sample * top >= number_of(low)).to(tl.int32), 0)
                # With many candidates, listing weights is cheaper than listing logits and weighing
                # them later.
                many = larger > CHUNKS * SAMPLE // 8
        c = tl.arange(0, CHUNKS)
        if tl.program_id(0) == 0:
            tl.store(counts + c, c * 0, mask=c >= chunks)
        done, low, high, above, reached = collect_between(
            x, counts, weights, sums, arrivals, alone, many, low, high, floor, end, wanted, peak,
            temp, width, chunks, CHUNKS, CHUNK, LINES, ABREAST, WIDTH, SOFTMAX,
        )  # fmt: skip
    return token, done, by_line, low, high, above, reached


@triton.jit(early=())
def collect_kernel(
    x, temperature, top_k, top_p, min_p, seed, index, uniform, peaks, firsts, masses, tops,
    arrivals, counts, weights, sums, few_keys, few_weights, out, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    SAMPLE: tl.constexpr, SURE: tl.constexpr, TRIALS: tl.constexpr, ABREAST: tl.constexpr,
    WIDTH: tl.constexpr, RUN: tl.constexpr, FEW: tl.constexpr, SLICE: tl.constexpr,
    MAX_LINES: tl.constexpr, SOFTMAX: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [n]: the first token whose running kept weight exceeds a uniform number times the kept
    sum; drawn like in `draw_kernel`.

    Scratch, written where needed: the row's lists of weights > 0 between two bounds. counts [n,
    CHUNKS + MAX_LINES] int32: the length of each list, then the chunk of each list, or the lines
    found; weights [n, CHUNKS, CHUNK]: the entries of each list, in any order; sums [n, 2, CHUNKS]
    float64: as written by `weigh_chunks`. Rows that are not filtered, or not finite, have no lists.
    arrivals [n] int32: 0 at first.

    peaks to arrivals: as written by `survey_kernel`. few_keys [n, FEW] int64, few_weights [n, FEW]:
    scratch of `draw_few`, or None without top-k.
    """
    await_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    count, share, least = filters_of(top_k, top_p, min_p, row, width)
    temp = temperature_of(temperature, row, SOFTMAX)
    # Issue these loads before it is known whether they are needed.
    line_maxima = None
    if top_k is not None:
        line_maxima = load_tops(tops, row, chunks * (CHUNK // LINE), CHUNKS * CHUNK // LINE)
    peak, chunk_peak, scale, mass, finite = summary_of(
        peaks, masses, row, temp, chunks, CHUNKS, SOFTMAX
    )
    fraction = fraction_of(seed, index, uniform, row)
    x += row * stride
    counts += row * (CHUNKS + MAX_LINES)
    weights += row * CHUNKS * CHUNK
    sums += row * 2 * CHUNKS
    token = tl.full([], -2, tl.int32)
    done = tl.full([], False, tl.int1)
    by_line = done
    low, high = token, token
    above, reached = tl.zeros([CHUNKS], tl.float64), tl.full([], 0.0, tl.float64)
    if finite & (temp != 0.0) & ((count > 0) | (share < 1.0) | (least > 0.0)):
        if top_k is not None:
            few_keys += row * FEW
            few_weights += row * FEW
        token, done, by_line, low, high, above, reached = collect_row(
            x, line_maxima, counts, weights, sums, few_keys, few_weights, arrivals + row, peak,
            mass, temp, count, share, least, fraction, width, chunks,
            CHUNKS, CHUNK, LINE, LINES, SAMPLE, SURE, TRIALS, FEW, SLICE, MAX_LINES,
            ABREAST, WIDTH, SOFTMAX, SHARE, top_p is not None,
        )  # fmt: skip
    elif tl.program_id(0) == 0:
        token = draw_plain(
            x, firsts, peaks, row, peak, chunk_peak, scale, mass, finite, temp, fraction, width,
            chunks, CHUNKS, CHUNK, RUN, SOFTMAX,
        )  # fmt: skip
    if done:
        token = draw_listed(
            x, counts, weights, by_line, above, reached, low, high, peak, chunk_peak, scale, mass,
            temp, count, share, least, fraction, width, CHUNKS, CHUNK, WIDTH, RUN, SOFTMAX, SHARE,
        )  # fmt: skip
    if token != -2:
        tl.store(out + row, token.to(out.dtype.element_ty))
