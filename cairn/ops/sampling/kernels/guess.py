"""Between which numbers the threshold of a nucleus lies, guessed from some numbers of each row:
see `passes`."""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.bounds import both_added
from cairn.ops.sampling.kernels.filters import bits_of
from cairn.ops.sampling.kernels.teams import number_of


@triton.jit
def step_between(width, SOME: tl.constexpr, RUN: tl.constexpr):
    """How far the runs of `some_of_row` lie apart."""
    return tl.cdiv(tl.cdiv(width, SOME // RUN), RUN) * RUN


@triton.jit
def some_of_row(x, row, stride, width, SOME: tl.constexpr, RUN: tl.constexpr, ALIGN: tl.constexpr):
    """SOME numbers of a row from all over it, RUN side by side; 0 beyond it. Each stands for as
    many as one in `step_between` / RUN."""
    base = row * stride
    # Runs begin where memory is aligned.
    begin = ((ALIGN - base % ALIGN) % ALIGN).to(tl.int32)
    step = step_between(width, SOME, RUN)
    i = tl.arange(0, SOME)
    at = tl.multiple_of(base + begin, ALIGN)
    place = i // RUN * step + i % RUN
    last = (SOME // RUN - 1) * step + RUN
    if begin + last <= width:
        some = tl.load(x + at + place)
    else:
        some = tl.load(x + at + place, mask=place < width - begin, other=0.0)
    return some


@triton.jit
def largest_of_each(a, b, c, d, e, f):
    """Of two triples, number by number."""
    return tl.maximum(a, d), tl.maximum(b, e), tl.maximum(c, f)


@triton.jit
def rank_of_sum(count, size, stands_for, spare, rest, before):
    """How many of some numbers sum up to spare, from the smallest on, by count [BINS] of them in
    bins, each of about `size` [BINS] and standing for so many: the bin where that is, and as a rank
    between them. rest, before: the sum and the number of those that are smaller than all bins'.

    Also the sum and the number of what is below the bin, and how many it has."""
    j = tl.arange(0, count.shape[0])
    mass = count * size * stands_for
    below, running = tl.associative_scan((mass, count), 0, both_added)
    below, running = below + rest, running + before
    small = below <= spare
    bin, rest, before = tl.reduce(
        (tl.where(small, j + 1, 0), tl.where(small, below, rest), tl.where(small, running, before)),
        0,
        largest_of_each,
    )
    own, many = tl.reduce(
        (tl.where(j == bin, mass, 0.0), tl.where(j == bin, count, 0.0)), 0, both_added
    )
    # Behind the last bin there is nothing.
    part = tl.minimum(tl.maximum((spare - rest) / tl.where(own > 0.0, own, 1.0), 0.0), 1.0)
    return bin, before + part * many, rest, before, many


@triton.jit
def key_of_rank(count, before, rank, first, WIDE: tl.constexpr):
    """The number, as bits, that `rank` of some numbers do not reach, by count [BINS] of them in
    bins from `first` on, each of 2 ** WIDE floats, in which they are spread evenly; before: how
    many are smaller. And its bin."""
    j = tl.arange(0, count.shape[0])
    running = tl.cumsum(count, 0) + before
    under = running <= rank
    bin, begin, _all = tl.reduce(
        (tl.where(under, j + 1, 0), tl.where(under, running, before), running), 0, largest_of_each
    )
    own = tl.sum(tl.where(j == bin, count, 0.0), 0)
    part = tl.minimum(tl.maximum((rank - begin) / tl.where(own > 0.0, own, 1.0), 0.0), 1.0)
    return first + (bin << WIDE) + (part * (1 << WIDE)).to(tl.int32), bin


@triton.jit
def near_of(some, spare, stands_for, near, BINS: tl.constexpr):
    """[low, high) as bits: between them lie, on each side of the number below which all sum up to
    spare, about `near` of the numbers some [N], each of which stands for so many."""
    # Bins of a quarter of a power of two, which end with 1.
    WIDE: tl.constexpr = 21
    FIRST: tl.constexpr = (127 << 23) - (BINS << WIDE)
    j = tl.arange(0, BINS)
    place = (bits_of(some) - FIRST) >> WIDE
    # Smaller and larger ones count in the first and the last.
    count = tl.histogram(tl.minimum(tl.maximum(place, 0), BINS - 1), BINS).to(tl.float32)
    middle = number_of(FIRST + (j << WIDE) + (1 << WIDE - 1))
    bin, rank, rest, before, many = rank_of_sum(count, middle, stands_for, spare, 0.0, 0.0)
    low, low_bin = key_of_rank(count, 0.0, rank - near, FIRST, WIDE)
    high, high_bin = key_of_rank(count, 0.0, rank + near, FIRST, WIDE)
    # What the first and the last bin hold besides may be anything.
    low = tl.where(low_bin == 0, 1, low)
    high = tl.where(high_bin >= BINS - 1, 0x7F800000, high)
    if (many > 4 * near) & (bin > 0):
        # Bins of these numbers alone: 2 ** FINE floats each.
        FINE: tl.constexpr = 13
        tl.static_assert(BINS << FINE == 1 << WIDE)
        first = FIRST + (bin << WIDE)
        inside = place == bin
        finer = tl.histogram(tl.where(inside, (bits_of(some) - first) >> FINE, 0), BINS)
        others = some.shape[0] - tl.sum(inside.to(tl.int32), 0)
        finer = tl.where(j == 0, finer - others, finer).to(tl.float32)
        middle = number_of(first + (j << FINE) + (1 << FINE - 1))
        _bin, rank, _rest, _before, _many = rank_of_sum(
            finer, middle, stands_for, spare, rest, before
        )
        if rank - near > before:
            low, _low = key_of_rank(finer, before, rank - near, first, FINE)
        if rank + near < before + many:
            high, _high = key_of_rank(finer, before, rank + near, first, FINE)
    return low, high


@triton.jit
def guess_kernel(
    x, top_p, bounds, left_open, stride, width, room,
    SOME: tl.constexpr, RUN: tl.constexpr, BINS: tl.constexpr, ALIGN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """bounds [n, 2] int32: between which numbers, as bits, the threshold of the nucleus of a row of
    x [n, width] with a share of top_p [n] may lie, with about `room` of the row's numbers; 0 and 0
    if it keeps all. left_open [1] int32 becomes 0."""
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(top_p + row)
    some = some_of_row(x, row, stride, width, SOME, RUN, ALIGN)
    stands_for = step_between(width, SOME, RUN) / RUN
    low, high = near_of(some, 1.0 - share, stands_for, 0.5 * room / stands_for, BINS)
    tl.store(left_open, 0, mask=row == 0)
    tl.store(bounds + 2 * row, tl.where(share < 1.0, low, 0))
    tl.store(bounds + 2 * row + 1, tl.where(share < 1.0, high, 0))
