"""Kernels that choose one token of every row."""

from __future__ import annotations

from cairn.ops.attention.kernels import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import (
    among_kept,
    bits_of,
    filters_of,
    summary_of,
    temperature_of,
    weight_of,
)
from cairn.ops.sampling.kernels.lists import limit_of


@triton.jit
def mix(x):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform_of(seed, index):
    """The index-th uniform number of a seed, both int64, as in `counter_uniform`."""
    count = index.to(tl.uint64, bitcast=True) + 1
    bits = mix(mix(seed.to(tl.uint64, bitcast=True)) + count * 0x9E3779B97F4A7C15)
    return (bits >> 40).to(tl.float32) * 5.960464477539063e-08


@triton.jit
def uniform_kernel(seed, index, out, count, BLOCK: tl.constexpr):
    """out [count] float32 = `uniform_of` seed and index [count]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    s = tl.load(seed + place, mask=inside, other=0)
    i = tl.load(index + place, mask=inside, other=0)
    tl.store(out + place, uniform_of(s, i), mask=inside)


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


@triton.jit
def argmax_kernel(peaks, firsts, out, chunks, CHUNKS: tl.constexpr, EARLY: tl.constexpr):
    """out [n] int64: the most likely token of every surveyed row."""
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, most_likely(peaks, firsts, row, chunks, CHUNKS))


@triton.jit
def first_beyond(mass, target, place):
    """Where the running sum of mass [N] float64 first exceeds target at a place that has mass; if
    rounding lets none do so, the last that has."""
    able = mass > 0.0
    beyond = able & (tl.cumsum(mass, 0) > target)
    first = tl.min(tl.where(beyond, place, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(able, place, 0), 0)
    return tl.where(first == 0x7FFFFFFF, last, first)


@triton.jit
def draw_kernel(
    x, temperature, top_k, top_p, min_p, seed, index, uniform, rows,
    peaks, firsts, masses, bounds, counts, aboves, weights, out, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    SOFTMAX: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n]: the first token whose running kept weight exceeds a uniform number times the sum.

    uniform [n] float32, or None and seed, index [n] int64. Without filters there are no lists;
    only then can `rows` [n] say which row each is of. -1 where a row's sum is no number > 0.
    """
    await_previous(EARLY)
    number = tl.program_id(0).to(tl.int64)
    row = number
    if rows is not None:
        row = tl.load(rows + number).to(tl.int64)
    # All that a row needs is loaded at once.
    heat = temperature_of(temperature, row)
    count, share, least = filters_of(top_k, top_p, min_p, row, width)
    if uniform is not None:
        part = tl.load(uniform + number)
    else:
        part = uniform_of(tl.load(seed + number), tl.load(index + number))
    peak, chunk_peak, scale, mass, finite = summary_of(
        peaks, masses, row, heat, chunks, CHUNKS, SOFTMAX
    )
    token = most_likely(peaks, firsts, row, chunks, CHUNKS)
    if heat != 0.0:
        token = -1
        c = tl.arange(0, CHUNKS)
        filtered = finite & ((count > 0) | (share < 1.0) | (least > 0.0))
        threshold = -1
        taken = c * 0
        # The outer one is decided when the kernel is compiled.
        if weights is not None:  # noqa: SIM102
            if filtered:
                threshold, mass, taken, _partly = limit_of(
                    bounds, counts, aboves, weights, row, weight_of(peak, peak, heat, SOFTMAX),
                    count, share, least, tl.sum(mass, 0), CHUNKS, CHUNK, WIDTH, SHARE,
                )  # fmt: skip
        total = tl.sum(mass, 0)
        if finite & (total > 0.0) & (total < float("inf")):
            target = part.to(tl.float64) * total
            chunk = first_beyond(mass, target, c)
            here = c == chunk
            target -= tl.sum(tl.where(c < chunk, mass, 0.0), 0)
            # Sums of chunks that were not filtered are relative to their own peaks.
            if not filtered:
                peak = tl.max(tl.where(here, chunk_peak, float("-inf")), 0)
                target /= tl.sum(tl.where(here, scale, 0.0), 0)
            j = tl.arange(0, CHUNK)
            inside = chunk * CHUNK + j < width
            at = x + row * stride + chunk * CHUNK + j
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            weight = weight_of(value, peak, heat, SOFTMAX)
            weight = tl.where(inside, weight, 0.0)
            kept = among_kept(bits_of(weight), threshold, tl.sum(tl.where(here, taken, 0), 0))
            kept = tl.where(kept, weight, 0.0).to(tl.float64)
            token = chunk * CHUNK + first_beyond(kept, target, j)
    tl.store(out + number, token.to(out.dtype.element_ty))
