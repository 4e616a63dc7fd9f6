"""Kernels that choose one token of every row."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous
from cairn.ops.sampling.kernels.filters import (
    bits_of,
    first_beyond,
    summary_of,
    temperature_of,
    weight_of,
)
from cairn.ops.sampling.kernels.lists import last_taken, limit_of
from cairn.ops.sampling.kernels.uniform import fraction_of


@triton.jit
def most_likely(peaks, firsts, row, chunks, CHUNKS: tl.constexpr):
    """The first token of the largest value; -1 where there is NaN or nothing above -inf."""
    c = tl.arange(0, CHUNKS)
    own = c < chunks
    peak = tl.load(peaks + row * chunks + c, mask=own, other=float("-inf"))
    first = tl.load(firsts + row * chunks + c, mask=own, other=0)
    best = tl.max(peak, 0)
    token = tl.min(tl.where(own & (peak == best), first, 0x7FFFFFFF), 0)
    polluted = tl.max((peak != peak).to(tl.int32), 0)
    return tl.where((polluted > 0) | (best == float("-inf")), -1, token)


@triton.jit(early=())
def argmax_kernel(peaks, firsts, out, chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """out [n] int64: the most likely token of every surveyed row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, most_likely(peaks, firsts, row, chunks, CHUNKS))


@triton.jit
def kept_of(x, place, whole, peak, temp, threshold, last, width, SOFTMAX: tl.constexpr):
    """The kept weights at places of a row at x, float64, 0 elsewhere: those above the threshold,
    and those equal to it up to place `last`. whole: all places lie inside the row."""
    inside = place < width
    if whole:
        value = tl.load(x + place)
    else:
        value = tl.load(x + place, mask=inside, other=0.0)
    weight = tl.where(inside, weight_of(value.to(tl.float32), peak, temp, SOFTMAX), 0.0)
    key = bits_of(weight)
    kept = (key > threshold) | ((key == threshold) & (place <= last))
    return tl.where(kept, weight, 0.0).to(tl.float64)


@triton.jit
def draw_kept(
    x, peak, chunk_peak, scale, mass, temp, threshold, last, target, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr, SOFTMAX: tl.constexpr,
    FILTERED: tl.constexpr,
):  # fmt: skip
    """The place where the running sum of a row's kept weights first exceeds target: found by chunk,
    then by run of RUN elements, then by element. mass [CHUNKS] float64: the kept sum of each chunk;
    threshold, last: as in `kept_of`; the other arguments: as returned by `summary_of`."""
    c = tl.arange(0, CHUNKS)
    chunk = first_beyond(mass, target, c)
    target -= tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    # Sums of chunks that were not filtered are relative to their own peaks.
    if not FILTERED:
        peak = tl.max(tl.where(c == chunk, chunk_peak, float("-inf")), 0)
        target /= tl.sum(tl.where(c == chunk, scale, 0.0), 0)
    run = tl.arange(0, CHUNK // RUN)
    i = tl.arange(0, RUN)
    place = chunk * CHUNK + run[:, None] * RUN + i[None, :]
    # Masked loads of probabilities would be issued one after the other.
    whole = False if SOFTMAX else (chunk + 1) * CHUNK <= width
    masses = tl.sum(kept_of(x, place, whole, peak, temp, threshold, last, width, SOFTMAX), 1)
    best = first_beyond(masses, target, run)
    target -= tl.sum(tl.where(run < best, masses, 0.0), 0)
    place = chunk * CHUNK + best * RUN + i
    kept = kept_of(x, place, whole, peak, temp, threshold, last, width, SOFTMAX)
    return first_beyond(kept, target, place)


@triton.jit
def draw_plain(
    x, firsts, peaks, row, peak, chunk_peak, scale, mass, finite, temp, fraction, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The token of a row at x without filters, or that is not finite, from the output of
    `summary_of`; -1 where the row's sum is 0, infinite or NaN."""
    token = tl.full([], -1, tl.int32)
    if temp == 0.0:
        token = most_likely(peaks, firsts, row, chunks, CHUNKS)
    elif finite:
        total = tl.sum(mass, 0)
        if (total > 0.0) & (total < float("inf")):
            token = draw_kept(
                x, peak, chunk_peak, scale, mass, temp, -1, width,
                fraction.to(tl.float64) * total, width, CHUNKS, CHUNK, RUN, SOFTMAX, False,
            )  # fmt: skip
    return token


@triton.jit(early=())
def draw_kernel(
    x, temperature, seed, index, uniform, rows, peaks, firsts, masses, out, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr,
    SOFTMAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [n]: the first token whose running weight exceeds a uniform number times the sum.

    uniform [n] float32, or None and seed, index [n] int64. rows [n]: the row that each output is
    drawn from, or None: one output per row.
    """
    await_previous(PDL)
    number = tl.program_id(0).to(tl.int64)
    row = number
    if rows is not None:
        row = tl.load(rows + number).to(tl.int64)
    temp = temperature_of(temperature, row, SOFTMAX)
    fraction = fraction_of(seed, index, uniform, number)
    peak, chunk_peak, scale, mass, finite = summary_of(
        peaks, masses, row, temp, chunks, CHUNKS, SOFTMAX
    )
    token = draw_plain(
        x + row * stride, firsts, peaks, row, peak, chunk_peak, scale, mass, finite, temp, fraction,
        width, chunks, CHUNKS, CHUNK, RUN, SOFTMAX,
    )  # fmt: skip
    tl.store(out + number, token.to(out.dtype.element_ty))


@triton.jit
def draw_listed(
    x, counts, weights, by_line, above, reached, low, high, peak, chunk_peak, scale, mass, temp,
    count, share, least, fraction, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr,
    SOFTMAX: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """The token of a row at x that has lists, as `collect_kernel` describes; -1 where the row's sum
    is 0, infinite or NaN. WIDTH: elements of each list held in registers; fraction: a uniform
    number, of the kept sum; the other arguments: as in `limit` and `summary_of`."""
    threshold, mass, taken, partly = limit_of(
        counts, weights, by_line, above, reached, weight_of(peak, peak, temp, SOFTMAX), low, high,
        count, share, least, tl.sum(mass, 0), CHUNKS, CHUNK, WIDTH, SHARE,
    )  # fmt: skip
    total = tl.sum(mass, 0)
    last = width
    if partly:
        last = last_taken(x, threshold, taken, peak, temp, width, CHUNKS, CHUNK, SOFTMAX)
    token = tl.full([], -1, tl.int32)
    if (total > 0.0) & (total < float("inf")):
        token = draw_kept(
            x, peak, chunk_peak, scale, mass, temp, threshold, last,
            fraction.to(tl.float64) * total, width, CHUNKS, CHUNK, RUN, SOFTMAX, True,
        )  # fmt: skip
    return token
