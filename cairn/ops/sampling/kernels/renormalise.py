"""Kernels that keep what a row's filters keep, divided by its sum."""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.blocks import aligned_block
from cairn.ops.sampling.kernels.filters import bits_of, filters_of, summary_of
from cairn.ops.sampling.kernels.lists import last_taken, limit_of


@triton.jit
def limit_kernel(
    x, top_k, top_p, min_p, peaks, masses, bounds, counts, aboves, weights,
    cuts, totals, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What `renormalise_kernel` keeps of probabilities x: cuts [n, 2] int32, the least weight as
    bits and the last place of one that is equal to it; totals [n] float64, their sum."""
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    count, share, least = filters_of(top_k, top_p, min_p, row, width)
    peak, _, _, mass, finite = summary_of(peaks, masses, row, 1.0, chunks, CHUNKS, False)
    threshold = -1
    last = width
    if finite & ((count > 0) | (share < 1.0) | (least > 0.0)):
        threshold, mass, taken, partly = limit_of(
            bounds, counts, aboves, weights, row, peak, count, share, least, tl.sum(mass, 0),
            CHUNKS, CHUNK, WIDTH, SHARE,
        )  # fmt: skip
        if partly:
            last = last_taken(
                x + row * stride, threshold, taken, peak, 1.0, width, CHUNKS, CHUNK, False
            )
    tl.store(cuts + row * 2, threshold)
    tl.store(cuts + row * 2 + 1, last)
    tl.store(totals + row, tl.sum(mass, 0))


@triton.jit
def store_kept(x, out, place, threshold, last, total, width, WHOLE: tl.constexpr):
    """out = x / total where x is kept, else 0."""
    inside = None if WHOLE else (place >= 0) & (place < width)
    weight = tl.load(x, mask=inside)
    key = bits_of(weight)
    kept = (key > threshold) | ((key == threshold) & (place <= last))
    tl.store(out, tl.where(kept, weight, 0.0) / total, mask=inside)


@triton.jit
def renormalise_kernel(
    x, cuts, totals, out, stride, width,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x / total where x is kept, else 0."""
    await_previous(EARLY)
    row = tl.program_id(1).to(tl.int64)
    threshold = tl.load(cuts + row * 2)
    last = tl.load(cuts + row * 2 + 1)
    total = tl.maximum(tl.load(totals + row).to(tl.float32), 1.1754943508222875e-38)
    at, place, whole = aligned_block(row * stride, tl.program_id(0), width, BLOCK, ALIGN)
    to, _, _ = aligned_block(row * width, tl.program_id(0), width, BLOCK, ALIGN)
    i = tl.arange(0, BLOCK)
    if whole:
        store_kept(x + at + i, out + to + i, place, threshold, last, total, width, True)
    else:
        store_kept(x + at + i, out + to + i, place, threshold, last, total, width, False)
