"""Uniform numbers from counters."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous


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
def fraction_of(seed, index, uniform, row):
    """The row's number of uniform [n] float32, or if that is None, of seed and index [n] int64."""
    if uniform is not None:
        fraction = tl.load(uniform + row)
    else:
        fraction = uniform_of(tl.load(seed + row), tl.load(index + row))
    return fraction


@triton.jit(early=())
def uniform_kernel(seed, index, out, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [count] float32 = `uniform_of` seed and index [count]."""
    await_previous(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    s = tl.load(seed + place, mask=inside, other=0)
    i = tl.load(index + place, mask=inside, other=0)
    tl.store(out + place, uniform_of(s, i), mask=inside)
