"""Min-p alone: its threshold is known as soon as the largest weight is, so nothing is listed."""

from __future__ import annotations

from cairn.ops.attention.kernels import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.blocks import aligned_block
from cairn.ops.sampling.kernels.filters import bits_of


@triton.jit
def least_of(min_p, peaks, row, chunks, CHUNKS: tl.constexpr):
    """Bits of the least probability that a row keeps; 0 where it is not finite."""
    c = tl.arange(0, CHUNKS)
    peak = tl.load(peaks + row * chunks + c, mask=c < chunks, other=0.0)
    odd = tl.max(((peak != peak) | (peak == float("inf"))).to(tl.int32), 0)
    least = tl.load(min_p + row) * tl.max(peak, 0)
    return tl.where((odd == 0) & (least > 0.0), bits_of(least), 0)


@triton.jit
def kept_mass_kernel(
    x, min_p, peaks, masses, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """masses [n, chunks] float64: the sum of what each chunk keeps."""
    await_previous(EARLY)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    least = least_of(min_p, peaks, row, chunks, CHUNKS)
    at = row * chunks + chunk
    mass = tl.full([], 0.0, tl.float64)
    # Mostly few chunks keep any: the others are not read again.
    if bits_of(tl.load(peaks + at)) >= least:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(x + row * stride + place, mask=place < width, other=0.0)
        mass = tl.sum(tl.where(bits_of(value) >= least, value, 0.0).to(tl.float64), 0)
    tl.store(masses + at, mass)


@triton.jit
def store_shares(x, out, place, threshold, total, width, WHOLE: tl.constexpr):
    """out = x / total where x is kept, else 0."""
    inside = None if WHOLE else (place >= 0) & (place < width)
    value = tl.load(x, mask=inside)
    kept = bits_of(value) >= threshold
    tl.store(out, tl.where(kept, value, 0.0) / total, mask=inside)


@triton.jit
def kept_shares_kernel(
    x, min_p, peaks, masses, out, stride, width, chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x divided by the sum of what its row keeps where it is kept, else 0."""
    await_previous(EARLY)
    row = tl.program_id(1).to(tl.int64)
    threshold = least_of(min_p, peaks, row, chunks, CHUNKS)
    c = tl.arange(0, CHUNKS)
    mass = tl.load(masses + row * chunks + c, mask=c < chunks, other=0.0)
    total = tl.maximum(tl.sum(mass, 0).to(tl.float32), 1.1754943508222875e-38)
    at, place, whole = aligned_block(row * stride, tl.program_id(0), width, BLOCK, ALIGN)
    to, _, _ = aligned_block(row * width, tl.program_id(0), width, BLOCK, ALIGN)
    i = tl.arange(0, BLOCK)
    if whole:
        store_shares(x + at + i, out + to + i, place, threshold, total, width, True)
    else:
        store_shares(x + at + i, out + to + i, place, threshold, total, width, False)
