"""Kernels of the few largest numbers of a row, one after the other."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import ordered


@triton.jit
def preferred(value, place):
    """int64 that orders a row's numbers: the larger first, NaN before all, of equal ones the first
    place."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - place)


@triton.jit
def largest_of(key):
    """The largest of int64 [N] that `preferred` gave, or that stand for none: by maxima of int32,
    which a warp finds in one instruction."""
    high = (key >> 32).to(tl.int32)
    # Clear the sign bit: non-negative int32 compare like the unsigned values.
    low = (key & 0x7FFFFFFF).to(tl.int32)
    best = tl.max(high, 0)
    rest = tl.max(tl.where(high == best, low, 0), 0)
    return (best.to(tl.int64) << 32) | rest


@triton.jit
def few_kernel(
    x, values, indices, stride, width, topk,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, KP: tl.constexpr,
    LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """values, indices [rows, topk]: the largest numbers of one row, one after the other.

    Place i is of group i % GROUPS. The best of every group are held; a group whose best is taken is
    read again, for the best behind that.

    Args:
        SIZE: numbers of a group, padded; STEP: those that are read at once; LANES: SIZE, at least
            the threads of a program, so that each has one.
        WHOLE: groups are not padded.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    group = tl.arange(0, GROUPS)
    nothing = -9223372036854775808
    best = tl.full([GROUPS], nothing, tl.int64)
    for begin in range(0, SIZE, STEP):
        place = (begin + tl.arange(0, STEP))[:, None] * GROUPS + group[None, :]
        if WHOLE:
            key = preferred(tl.load(x + place), place)
        else:
            value = tl.load(x + place, mask=place < width, other=0.0)
            key = tl.where(place < width, preferred(value, place), nothing)
        best = tl.maximum(best, tl.max(key, 0))
    k = tl.arange(0, KP)
    taken = tl.zeros([KP], tl.int32)
    line = tl.arange(0, LANES)
    for i in range(topk):
        first = largest_of(best)
        at = 0x7FFFFFFF - (first & 0x7FFFFFFF).to(tl.int32)
        taken = tl.where(k == i, at, taken)
        own = at % GROUPS
        place = line * GROUPS + own
        there = (line < SIZE) & (place < width)
        value = tl.load(x + place, mask=there, other=0.0)
        key = tl.where(there, preferred(value, place), nothing)
        behind = largest_of(tl.where(key < first, key, nothing))
        best = tl.where(group == own, behind, best)
    inside = k < topk
    to = row * topk + k
    tl.store(indices + to, taken.to(tl.int64), mask=inside)
    tl.store(values + to, tl.load(x + taken, mask=inside), mask=inside)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if there is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def first_kernel(
    x, values, indices, stride, width,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """values, indices [rows]: the largest number of one row, the first of equal ones.

    Groups as in `few_kernel`, of which numbers are held without their places: the group that has
    the largest is read again, or if there are several, their numbers in order up to it.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    group = tl.arange(0, GROUPS)
    most = tl.full([GROUPS], float("-inf"), tl.float32)
    for begin in range(0, SIZE, STEP):
        place = (begin + tl.arange(0, STEP))[:, None] * GROUPS + group[None, :]
        if WHOLE:
            value = tl.load(x + place)
        else:
            value = tl.load(x + place, mask=place < width, other=float("-inf"))
        most = larger(most, tl.reduce(value.to(tl.float32), 0, larger))
    best = ordered(most)
    first = tl.max(best, 0)
    tied = best == first
    # No position found yet.
    at = tl.full([], 0x7FFFFFFF, tl.int32)
    # For short float32 rows a pass over the whole row is faster than one over a group.
    if SIZE > STEP or x.dtype.element_ty != tl.float32:  # noqa: SIM102
        if tl.sum(tied.to(tl.int32), 0) == 1:
            place = tl.arange(0, SIZE) * GROUPS + tl.min(tl.where(tied, group, GROUPS), 0)
            value = tl.load(x + place, mask=place < width, other=0.0)
            found = (place < width) & (ordered(value) == first)
            at = tl.min(tl.where(found, place, 0x7FFFFFFF), 0)
    begin = 0
    while at == 0x7FFFFFFF:
        place = (begin + tl.arange(0, STEP))[:, None] * GROUPS + group[None, :]
        shown = tied[None, :] & (place < width)
        value = tl.load(x + place, mask=shown, other=0.0)
        found = shown & (ordered(value) == first)
        at = tl.min(tl.min(tl.where(found, place, 0x7FFFFFFF), 0), 0)
        begin += STEP
    tl.store(indices + row, at.to(tl.int64))
    tl.store(values + row, tl.load(x + at))
