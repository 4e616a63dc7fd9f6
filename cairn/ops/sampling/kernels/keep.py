"""Kernels that filter rows of probabilities: what a row's filters keep, and the rows with it."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous
from cairn.ops.sampling.kernels.bounds import load_tops
from cairn.ops.sampling.kernels.collect import collect_row
from cairn.ops.sampling.kernels.filters import bits_of, filters_of, summary_of
from cairn.ops.sampling.kernels.lists import last_taken, limit_of


@triton.jit(early=())
def limits_kernel(
    x, top_k, top_p, min_p, peaks, masses, tops, arrivals, counts, weights, sums,
    thresholds, lasts, totals, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    SAMPLE: tl.constexpr, SURE: tl.constexpr, TRIALS: tl.constexpr, ABREAST: tl.constexpr,
    WIDTH: tl.constexpr, MAX_LINES: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The threshold of every row's filters: see `keep_kernel`.

    A row without filters, or that is not finite, keeps all. peaks to sums: as in `collect_kernel`.
    """
    await_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    count, share, least = filters_of(top_k, top_p, min_p, row, width)
    line_maxima = None
    if top_k is not None:
        line_maxima = load_tops(tops, row, chunks * (CHUNK // LINE), CHUNKS * CHUNK // LINE)
    peak, _peaks, _scale, mass, finite = summary_of(peaks, masses, row, 1.0, chunks, CHUNKS, False)
    x += row * stride
    counts += row * (CHUNKS + MAX_LINES)
    weights += row * CHUNKS * CHUNK
    sums += row * 2 * CHUNKS
    if finite & ((count > 0) | (share < 1.0) | (least > 0.0)):
        _token, done, by_line, low, high, above, reached = collect_row(
            x, line_maxima, counts, weights, sums, None, None, arrivals + row, peak, mass, 1.0,
            count, share, least, 0.0, width, chunks,
            CHUNKS, CHUNK, LINE, LINES, SAMPLE, SURE, TRIALS, 0, 1, MAX_LINES, ABREAST, WIDTH,
            False, SHARE, top_p is not None,
        )  # fmt: skip
        if done:
            threshold, kept, taken, partly = limit_of(
                counts, weights, by_line, above, reached, peak, low, high, count, share, least,
                tl.sum(mass, 0), CHUNKS, CHUNK, WIDTH, SHARE,
            )  # fmt: skip
            last = width
            if partly:
                last = last_taken(x, threshold, taken, peak, 1.0, width, CHUNKS, CHUNK, False)
            tl.store(thresholds + row, threshold)
            tl.store(lasts + row, last)
            tl.store(totals + row, tl.sum(kept, 0))
    elif tl.program_id(0) == 0:
        tl.store(thresholds + row, -1)
        tl.store(lasts + row, width)
        tl.store(totals + row, tl.sum(mass, 0))


@triton.jit(early=())
def keep_kernel(
    x, out, thresholds, lasts, totals, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out [n, width] = what a row keeps of x, divided by its sum; 0 elsewhere.

    Args:
        thresholds [n] int32: the least weight that is kept, as bits; -1: all are.
        lasts [n] int32: of those equal to it, the last place that is kept.
        totals [n] float64: the sum of what is kept.
    """
    await_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    value = tl.load(x + row * stride + place, mask=inside, other=0.0)
    threshold = tl.load(thresholds + row)
    total = tl.maximum(
        tl.load(totals + row).to(tl.float32),
        1.1754943508222875e-38,
        propagate_nan=tl.PropagateNan.ALL,
    )
    key = bits_of(value)
    kept = (key > threshold) | ((key == threshold) & (place <= tl.load(lasts + row)))
    share = value / total
    shares = tl.where(threshold < 0, share, tl.where(kept, share, 0.0))
    tl.store(out + row * width + place, shares, mask=inside)
