"""Kernels that find the few largest elements of a row, one at a time."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import ordered


@triton.jit
def preferred(value, place):
    """int64 key of a value at an index: a larger value has a larger key, NaN the largest, and of
    equal values the one with the lower index."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - place)


@triton.jit
def largest_of(key):
    """The largest of keys int64 [N] from `preferred` (or the key of an empty group), by two maxima
    of int32, which a warp reduces in one instruction."""
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
    """Write values, indices [rows, topk]: the largest elements of one row, found one at a time.

    Element i belongs to group i % GROUPS. The program holds the largest key of every group; when it
    is taken, the group is read again to find the next largest.

    Args:
        SIZE: elements of a group, padded. STEP: those read per iteration. LANES: SIZE, but at least
            one element per thread of the program.
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
    """The larger of two numbers; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def first_kernel(
    x, values, indices, stride, width,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write values, indices [rows]: the largest element of one row, the first of equal ones.

    Groups as in `few_kernel`. Only values are held, without indices: the group with the largest
    value is read again to find its index; if several groups have it, they are read in order up to
    its first occurrence.
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
