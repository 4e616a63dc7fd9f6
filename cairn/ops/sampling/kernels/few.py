"""The draw from a row of which few numbers can be kept: each is compared with all others."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import first_beyond


@triton.jit
def list_few(weights, places, weight, place, listed, FEW: tl.constexpr):
    """Write those of the lines' weights [N, LINE] that are listed into one list, and their places,
    if they are FEW at most; how many they are."""
    listed = listed.to(tl.int32)
    each = tl.sum(listed, 1)
    total = tl.sum(each, 0)
    if total <= FEW:
        before = tl.cumsum(each, 0) - each
        order = before[:, None] + tl.cumsum(listed, 1) - 1
        tl.store(weights + order, weight, mask=listed > 0)
        tl.store(places + order, place, mask=listed > 0)
    return total


@triton.jit
def ranks_of(weights, places, weight, place, listed, FEW: tl.constexpr, SLICE: tl.constexpr):
    """How many of a list come before each of its weights [FEW]: from the largest down, of equal
    ones the first first; and in the order of their places."""
    packed = tl.zeros([FEW], tl.int32)
    for begin in range(0, listed, SLICE):
        j = begin + tl.arange(0, SLICE)
        rival = tl.load(weights + j, mask=j < listed, other=0.0)[:, None]
        ahead = tl.load(places + j, mask=j < listed, other=0x7FFFFFFF)[:, None] < place[None, :]
        more = (rival > weight[None, :]) | ((rival == weight[None, :]) & ahead)
        # Two counts in one sum.
        packed += tl.sum(more.to(tl.int32) + (ahead.to(tl.int32) << 16), 0)
    return packed & 0xFFFF, packed >> 16


@triton.jit
def draw_few(
    weights, places, listed, top, k, share, least, total, part,
    SHARE: tl.constexpr, FEW: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The token of a row all of whose kept weights are in one list of `listed`, in any order, with
    their places. The list is changed.

    top, k, share, least, total, SHARE: as of `limit`; part: of the kept sum, a uniform number.
    """
    # Between what threads write for each other and read, and before they write over it.
    tl.debug_barrier()
    i = tl.arange(0, FEW)
    inside = i < listed
    weight = tl.load(weights + i, mask=inside, other=0.0)
    place = tl.load(places + i, mask=inside, other=0x7FFFFFFF)
    rank, order = ranks_of(weights, places, weight, place, listed, FEW, SLICE)
    tl.debug_barrier()
    tl.store(weights + rank, weight, mask=inside)
    tl.debug_barrier()
    # From the largest down: filters keep the first ones.
    descending = tl.load(weights + i, mask=inside, other=0.0)
    wide = descending.to(tl.float64)
    kept = inside & (descending >= tl.sum(tl.where(i == k - 1, descending, 0.0), 0))
    if share < 1.0:
        wanted = share.to(tl.float64)
        if SHARE == 1:
            wanted *= total
        if SHARE == 2:
            wanted *= tl.sum(tl.where(kept, wide, 0.0), 0)
        # The largest is kept whatever the share.
        kept = kept & (tl.cumsum(wide, 0) - wide < tl.maximum(wanted, 1e-300))
    kept = kept & (descending >= least * top)
    left = tl.sum(kept.to(tl.int32), 0)
    mass = tl.sum(tl.where(kept, wide, 0.0), 0)
    tl.debug_barrier()
    tl.store(weights + order, tl.where(rank < left, weight, 0.0), mask=inside)
    tl.store(places + order, place, mask=inside)
    tl.debug_barrier()
    in_place = tl.load(weights + i, mask=inside, other=0.0).to(tl.float64)
    place = tl.load(places + i, mask=inside, other=0)
    token = first_beyond(in_place, part.to(tl.float64) * mass, place)
    return tl.where(mass > 0.0, token, -1)
