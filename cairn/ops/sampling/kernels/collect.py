"""Lists of rows that are filtered, see `lists`, and the tokens of rows that need none."""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.draw import draw_plain
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
    """Whether few lines hold the top k of a row at x; then the first program lists them, or draws
    one if they are FEW at most and there is room: the token, or else -2. near: `keys_of` the row's
    lines."""
    hit = (near >= low) & (near > 0)
    found = tl.sum(hit.to(tl.int32), 0)
    by_line = (count > 0) & (count <= lines) & (found <= CHUNKS)
    token = tl.full([], -2, tl.int32)
    if by_line & (tl.program_id(0) == 0):
        keep_hits(hit, counts, CHUNKS)
        listed = collect_lines(
            x, counts, weights, few_keys, found, low, peak, heat, width,
            CHUNKS, CHUNK, LINE, FEW, SOFTMAX,
        )  # fmt: skip
        if few_keys is not None:  # noqa: SIM102
            if listed <= FEW:
                token = draw_few(
                    few_keys, few_weights, listed, top, count, share, least, total, part,
                    SHARE, FEW, SLICE,
                )  # fmt: skip
    return by_line, token


@triton.jit
def collect_row(
    x, top_of_lines, marked, bounds, counts, aboves, weights, few_keys, few_weights,
    row, peak, mass, heat, count, share, least, part, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, MARKS: tl.constexpr,
    FEW: tl.constexpr, SLICE: tl.constexpr,
    SOFTMAX: tl.constexpr, SHARE: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """The lists of a row at x that is filtered, LIMITED: by a top k, maybe; its token instead, or
    else -2."""
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
    if marked is not None:  # noqa: SIM102
        if share < 1.0:
            low, high = between(
                marked, row, tl.num_programs(0), low, high,
                wanted_of(share, total, SHARE), total, CHUNKS, MARKS,
            )  # fmt: skip
    c = tl.arange(0, CHUNKS)
    unweighed = c >= (chunks if marked is not None else 0)
    counts += row * 2 * CHUNKS
    aboves += row * CHUNKS
    weights += row * CHUNKS * CHUNK
    by_line = count < 0
    token = tl.full([], -2, tl.int32)
    if LIMITED:
        if few_keys is not None:
            few_keys += row * FEW
            few_weights += row * FEW
        by_line, token = limited(
            x, near, counts, weights, few_keys, few_weights, low, peak, heat, count,
            share, least, top, total, part, width, lines,
            CHUNKS, CHUNK, LINE, FEW, SLICE, SOFTMAX, SHARE,
        )  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        tl.store(bounds + row * 2, low)
        tl.store(bounds + row * 2 + 1, high)
        tl.store(aboves + c, tl.zeros([CHUNKS], tl.float64), mask=unweighed)
    if not by_line:
        if program == 0:
            tl.store(counts + CHUNKS + c, c)
            tl.store(counts + c, c * 0, mask=c >= chunks)
        collect_chunks(
            x, counts, aboves, weights, low, high, peak, heat, width, chunks,
            CHUNK, SOFTMAX, marked is not None,
        )  # fmt: skip
    return token


@triton.jit
def collect_kernel(
    x, temperature, top_k, top_p, min_p, seed, index, uniform, peaks, firsts, masses, tops, marked,
    bounds, counts, aboves, weights, few_keys, few_weights, out, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, MARKS: tl.constexpr,
    RUN: tl.constexpr, FEW: tl.constexpr, SLICE: tl.constexpr,
    SOFTMAX: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Lists the weights > 0 of a filtered row between two bounds.

    bounds [n, 2]: these; counts [n, 2, CHUNKS] int32: of each list, and its chunk; aboves
    [n, CHUNKS] float64; weights [n, CHUNKS, CHUNK]: the first counts of each list in some order.
    marked: of `weigh_kernel`, or None; few_keys [n, FEW] int64, few_weights [n, FEW]: room for
    `draw_few`, or None. Rows that are not filtered, or not finite, have no lists.

    out [n]: the token of a row that needs no lists, -2 of others; or None.
    """
    await_previous(EARLY)
    program = tl.program_id(0)
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
    part = 0.0
    if out is not None:
        part = part_of(seed, index, uniform, row)
    x += row * stride
    token = tl.full([], -2, tl.int32)
    if finite & (heat != 0.0) & ((count > 0) | (share < 1.0) | (least > 0.0)):
        token = collect_row(
            x, top_of_lines, marked, bounds, counts, aboves, weights, few_keys, few_weights,
            row, peak, mass, heat, count, share, least, part, width, chunks,
            CHUNKS, CHUNK, LINE, MARKS, FEW, SLICE, SOFTMAX, SHARE, top_k is not None,
        )  # fmt: skip
    elif out is not None:  # noqa: SIM102
        if program == 0:
            token = draw_plain(
                x, firsts, peaks, row, peak, chunk_peak, scale, mass, finite, heat, part, width,
                chunks, CHUNKS, CHUNK, RUN, SOFTMAX,
            )  # fmt: skip
    if out is not None:  # noqa: SIM102
        if program == 0:
            tl.store(out + row, token.to(out.dtype.element_ty))
