"""The largest of some numbers, without sorting: the count-th largest is searched for by counting.

They come out in the order of their places, and of equal ones the first are kept. (Comparing all
pairs instead is one step, but its code is long, and a program that runs once waits for its code.)
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def ordered(value):
    """float32 as uint32 of the same order, of which none is the last: above it is another. (Devices
    make a NaN of ones alone.)"""
    bits = tl.minimum((value + 0.0).to(tl.int32, bitcast=True), 0x7FFFFFF0)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def largest(value, inside, total, count, N: tl.constexpr):
    """Which of value [N] float32 are among the `count` largest inside (of equal ones the first),
    their places 0 .. in order of position, and how many they are.

    Args:
        total: how many are inside; a larger number will do if at least `count` are.
    """
    key = tl.where(inside, ordered(value), 0)
    low = tl.min(tl.where(inside, key, 0xFFFFFFFF), 0)
    return largest_from(key, inside, low, tl.max(key, 0) + 1, None, total, count, N)


@triton.jit
def largest_from(key, inside, low, high, reach, total, count, N: tl.constexpr):
    """`largest`, of `ordered` keys; inside all of them reach low, none high.

    Args:
        reach: how far from low the search looks at first, where N > 1024, or None. For what lies
            near to low.
    """
    wanted = tl.minimum(count, total)
    # At least `wanted` keys reach low, and at_high < wanted reach high.
    at_low = total
    at_high = 0
    while (high - low > 1) & (at_low != wanted):
        # Counts in one sum, as many as it has bits for: where all keys may reach a trial value,
        # one bit more than where the least key is low.
        if N <= 1024:
            step = tl.maximum((high - low) >> 2, 1)
            one = low + step
            two = one + step
            three = two + step
            sums = (key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 10)
            sums = tl.sum(sums + ((key >= three).to(tl.int32) << 20), 0)
            at_one, at_two, at_three = sums & 1023, (sums >> 10) & 1023, sums >> 20
        elif N < 1 << 15:
            step = tl.maximum((high - low) // 3, 1)
            if reach is not None:
                step = tl.minimum(step, reach)
                reach = tl.minimum(reach, 1 << 27) << 3
            one = low + step
            two = one + step
            three = two
            sums = tl.sum((key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 16), 0)
            at_one, at_two = sums & 0xFFFF, sums >> 16
            at_three = at_two
        else:
            step = tl.maximum((high - low) >> 2, 1)
            one = low + step
            two = one + step
            three = two + step
            wide = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 20)
            wide = tl.sum(wide + ((key >= three).to(tl.int64) << 40), 0)
            at_one = (wide & 0xFFFFF).to(tl.int32)
            at_two = ((wide >> 20) & 0xFFFFF).to(tl.int32)
            at_three = (wide >> 40).to(tl.int32)
        # Downwards for the upper bound, upwards for the lower one.
        high = tl.where(at_three < wanted, three, high)
        at_high = tl.where(at_three < wanted, at_three, at_high)
        high = tl.where(at_two < wanted, two, high)
        at_high = tl.where(at_two < wanted, at_two, at_high)
        high = tl.where(at_one < wanted, one, high)
        at_high = tl.where(at_one < wanted, at_one, at_high)
        low = tl.where(at_one >= wanted, one, low)
        at_low = tl.where(at_one >= wanted, at_one, at_low)
        low = tl.where(at_two >= wanted, two, low)
        at_low = tl.where(at_two >= wanted, at_two, at_low)
        low = tl.where(at_three >= wanted, three, low)
        at_low = tl.where(at_three >= wanted, at_three, at_low)
    above = inside & (key >= high)
    level = inside & (key >= low) & (key < high)
    missing = wanted - at_high
    # Two counts in one sum.
    if N < 1 << 15:
        places = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)
        levels = places >> 16
        places = places & 0xFFFF
    else:
        both = tl.cumsum(above.to(tl.int64) + (level.to(tl.int64) << 32), 0)
        levels = (both >> 32).to(tl.int32)
        places = both.to(tl.int32)
    taken = above | (level & (levels <= missing))
    return taken, places + tl.minimum(levels, missing) - 1, wanted
