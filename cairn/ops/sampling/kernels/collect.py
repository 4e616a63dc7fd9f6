"""Lists of rows that are filtered, see `lists`, and their tokens."""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.draw import draw_listed, draw_plain
from cairn.ops.sampling.kernels.few import draw_few
from cairn.ops.sampling.kernels.filters import (
    bits_of,
    filters_of,
    summary_of,
    temperature_of,
    weight_of,
)
from cairn.ops.sampling.kernels.lists import (
    between,
    collect_chunks,
    collect_lines,
    floor_of,
    keep_hits,
    keys_of,
    load_tops,
    wanted_of,
)
from cairn.ops.sampling.kernels.uniform import part_of


@triton.jit
def limited(
    x, near, counts, weights, few_keys, few_weights, low, peak, heat, count, share, least,
    top, total, part, width, lines,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, FEW: tl.constexpr,
    SLICE: tl.constexpr, SOFTMAX: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Whether few lines hold the top k of a row at x, and what `collect_row` returns: then the
    first program lists them, or draws one if they are FEW at most. near: `keys_of` the row's
    lines."""
    hit = (near >= low) & (near > 0)
    found = tl.sum(hit.to(tl.int32), 0)
    by_line = (count > 0) & (count <= lines) & (found <= CHUNKS)
    token = tl.full([], -2, tl.int32)
    listing = by_line & (tl.program_id(0) == 0)
    if listing:
        keep_hits(hit, counts, CHUNKS)
        listed = collect_lines(
            x, counts, weights, few_keys, found, low, peak, heat, width,
            CHUNKS, CHUNK, LINE, FEW, SOFTMAX,
        )  # fmt: skip
        if listed <= FEW:
            listing = tl.full([], False, tl.int1)
            token = draw_few(
                few_keys, few_weights, listed, top, count, share, least, total, part,
                SHARE, FEW, SLICE,
            )  # fmt: skip
    return by_line, token, listing


@triton.jit
def is_last(arrivals):
    """Whether the other programs of a row have all been here: what they stored can be loaded."""
    # What all threads stored is done before one of them says so.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    tl.debug_barrier()
    return last


@triton.jit
def collect_row(
    x, top_of_lines, marked, bounds, counts, aboves, weights, few_keys, few_weights, arrivals,
    row, peak, chunk_peak, scale, mass, heat, count, share, least, part, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr,
    MARKS: tl.constexpr, STEP: tl.constexpr, FEW: tl.constexpr, SLICE: tl.constexpr,
    SOFTMAX: tl.constexpr, SHARE: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Lists of a row at x that is filtered, LIMITED: by a top k, maybe. Returns its token instead,
    or else -2, and whether this program is the one that finds all its lists done."""
    total = tl.sum(mass, 0)
    top = weight_of(peak, peak, heat, SOFTMAX)
    lines = chunks * (CHUNK // LINE)
    near = None
    if LIMITED:
        near = keys_of(top_of_lines, peak, heat, lines, SOFTMAX)
    low = floor_of(
        near, peak, heat, total, count, share, least, width, lines, CHUNKS, SOFTMAX, SHARE
    )
    high = bits_of(top) + 1
    c = tl.arange(0, CHUNKS)
    summed = chunks * 0
    if marked is not None:  # noqa: SIM102
        if (count == 0) & (share < 1.0):
            summed = chunks
            chunk_top = scale.to(tl.float32)
            if not SOFTMAX:
                chunk_top = tl.maximum(chunk_peak, 0.0) / peak
            low, high = between(
                marked, row, chunk_top, scale, mass, top, low, high,
                wanted_of(share, total, SHARE), total, chunks, MARKS, STEP, CHUNKS // 2,
            )  # fmt: skip
    counts += row * 2 * CHUNKS
    aboves += row * CHUNKS
    weights += row * CHUNKS * CHUNK
    by_line = count < 0
    token = tl.full([], -2, tl.int32)
    done = tl.full([], False, tl.int1)
    if LIMITED:
        by_line, token, done = limited(
            x, near, counts, weights, few_keys + row * FEW, few_weights + row * FEW, low, peak,
            heat, count, share, least, top, total, part, width, lines,
            CHUNKS, CHUNK, LINE, FEW, SLICE, SOFTMAX, SHARE,
        )  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        tl.store(bounds + row * 2, low)
        tl.store(bounds + row * 2 + 1, high)
        tl.store(aboves + c, tl.zeros([CHUNKS], tl.float64), mask=c >= summed)
    if not by_line:
        if program == 0:
            tl.store(counts + CHUNKS + c, c)
            tl.store(counts + c, c * 0, mask=c >= chunks)
        collect_chunks(
            x, counts, aboves, weights, low, high, peak, heat, width, chunks,
            CHUNK, SOFTMAX, marked is not None,
        )  # fmt: skip
        done = is_last(arrivals + row)
    return token, done


@triton.jit
def collect_kernel(
    x, temperature, top_k, top_p, min_p, seed, index, uniform, peaks, firsts, masses, tops,
    marked, arrivals, bounds, counts, aboves, weights, few_keys, few_weights, out,
    stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, MARKS: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr, FEW: tl.constexpr,
    SLICE: tl.constexpr, SOFTMAX: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n]: the first token whose running kept weight exceeds a uniform number times the sum, as
    of `draw_kernel`.

    Written where it is needed: the row's lists of weights > 0 between two bounds. bounds [n, 2]:
    these; counts [n, 2, CHUNKS] int32: of each list, and its chunk; aboves [n, CHUNKS] float64;
    weights [n, CHUNKS, CHUNK]: the first counts of each list in some order. Rows that are not
    filtered, or not finite, have no lists. arrivals [n] int32: 0 at first.

    peaks to arrivals: of `survey_kernel`. few_keys [n, FEW] int64, few_weights [n, FEW]: room for
    `draw_few`, or None without a top k.
    """
    await_previous(EARLY)
    row = tl.program_id(1).to(tl.int64)
    count, share, least = filters_of(top_k, top_p, min_p, row, width)
    heat = temperature_of(temperature, row)
    # On their way before it is known whether they are needed.
    top_of_lines = None
    if top_k is not None:
        top_of_lines = load_tops(tops, row, chunks * (CHUNK // LINE), CHUNKS * CHUNK // LINE)
    peak, chunk_peak, scale, mass, finite = summary_of(
        peaks, masses, row, heat, chunks, CHUNKS, SOFTMAX
    )
    part = part_of(seed, index, uniform, row)
    x += row * stride
    token = tl.full([], -2, tl.int32)
    done = tl.full([], False, tl.int1)
    if finite & (heat != 0.0) & ((count > 0) | (share < 1.0) | (least > 0.0)):
        token, done = collect_row(
            x, top_of_lines, marked, bounds, counts, aboves, weights, few_keys, few_weights,
            arrivals, row, peak, chunk_peak, scale, mass, heat, count, share, least, part,
            width, chunks, CHUNKS, CHUNK, LINE, MARKS, STEP, FEW, SLICE, SOFTMAX, SHARE,
            top_k is not None,
        )  # fmt: skip
    elif tl.program_id(0) == 0:
        token = draw_plain(
            x, firsts, peaks, row, peak, chunk_peak, scale, mass, finite, heat, part, width,
            chunks, CHUNKS, CHUNK, RUN, SOFTMAX,
        )  # fmt: skip
    if done:
        # What the threads of this program have stored they now load of each other.
        tl.debug_barrier()
        token = draw_listed(
            x, bounds, counts, aboves, weights, row, peak, chunk_peak, scale, mass, heat,
            count, share, least, part, width, CHUNKS, CHUNK, WIDTH, RUN, SOFTMAX, SHARE,
        )  # fmt: skip
    if token != -2:
        tl.store(out + row, token.to(out.dtype.element_ty))
