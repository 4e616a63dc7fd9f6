"""Drawing from a row of which few weights can be kept: each is compared with all others."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import bits_of, first_beyond


@triton.jit
def list_few(keys, weight, place, listed, already, FEW: tl.constexpr):
    """Append the weights [N, LINE] with `listed` set, and their places, to a list of `already`
    keys, if all fit into FEW. Returns their total number.

    An int64 key holds both: a larger weight has a larger key, and of equal weights the first place.
    """
    key = bits_of(weight).to(tl.int64) << 32 | (0x7FFFFFFF - place)
    listed = listed.to(tl.int32)
    each = tl.sum(listed, 1)
    total = already + tl.sum(each, 0)
    if total <= FEW:
        before = already + tl.cumsum(each, 0) - each
        order = before[:, None] + tl.cumsum(listed, 1) - 1
        tl.store(keys + order, key, mask=listed > 0)
    return total


@triton.jit
def weight_in(key):
    """The weight of a key."""
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def place_in(key):
    """The place of a key."""
    return 0x7FFFFFFF - key.to(tl.int32)


@triton.jit
def ranks_of(keys, key, listed, FEW: tl.constexpr, SLICE: tl.constexpr):
    """For each key [FEW] of a list: its rank by descending weight (ties by place), and its rank by
    place."""
    packed = tl.zeros([FEW], tl.int32)
    for begin in range(0, listed, SLICE):
        j = begin + tl.arange(0, SLICE)
        rival = tl.load(keys + j, mask=j < listed, other=-1)[:, None]
        ahead = rival.to(tl.int32) > key.to(tl.int32)[None, :]
        # Two 16-bit counts packed into one int32, for one reduction.
        more = (rival > key[None, :]).to(tl.int32)
        packed += tl.sum(more + (ahead.to(tl.int32) << 16), 0)
    return packed & 0xFFFF, packed >> 16


@triton.jit
def draw_few(
    keys, weights, listed, top, k, share, least, total, fraction,
    SHARE: tl.constexpr, FEW: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The token of a row whose kept weights are all in one list of `listed` keys, in any order. The
    list is changed; weights [FEW] float32 is scratch.

    top, k, share, least, total, SHARE: as in `limit`; fraction: a uniform number, of the kept sum.
    """
    # Barriers separate stores from other threads' loads, and those loads from the stores that
    # overwrite them.
    tl.debug_barrier()
    i = tl.arange(0, FEW)
    inside = i < listed
    key = tl.load(keys + i, mask=inside, other=0)
    rank, order = ranks_of(keys, key, listed, FEW, SLICE)
    tl.store(weights + rank, weight_in(key), mask=inside)
    tl.debug_barrier()
    # In descending order: filters keep a prefix.
    descending = tl.load(weights + i, mask=inside, other=0.0)
    wide = descending.to(tl.float64)
    kept = inside & (descending >= tl.sum(tl.where(i == k - 1, descending, 0.0), 0))
    if share < 1.0:
        wanted = share.to(tl.float64)
        if SHARE == 1:
            wanted *= total
        if SHARE == 2:
            wanted *= tl.where(k > 0, tl.sum(tl.where(kept, wide, 0.0), 0), total)
        # The largest weight is kept even with top_p = 0.
        kept = kept & (tl.cumsum(wide, 0) - wide < tl.maximum(wanted, 1e-300))
    kept = kept & (descending >= least * top)
    left = tl.sum(kept.to(tl.int32), 0)
    mass = tl.sum(tl.where(kept, wide, 0.0), 0)
    # Clear the weight of keys that are filtered out.
    tl.store(keys + order, tl.where(rank < left, key, key & 0x7FFFFFFF), mask=inside)
    tl.debug_barrier()
    in_place = tl.load(keys + i, mask=inside, other=0)
    weight = weight_in(in_place).to(tl.float64)
    token = first_beyond(weight, fraction.to(tl.float64) * mass, place_in(in_place))
    return tl.where(mass > 0.0, token, -1)
