"""Filters of rows that teams of programs share out: read once, written once.

A row is split into parts of PART numbers, one for each program. What the parts have to know of each
other they leave in memory, and meet: then each does the same with what all have left, so that
nobody waits for a leader. What a row keeps is found in `largest`, `least` and `nucleus`. Programs
hold a part in registers from the load to the store, see `held`; or they keep but the maxima of its
lines, see `lines`.

Sums are of whole numbers, units of 2^-42 of the largest: they are the same in any order, and so do
not depend on how a row is split.
"""

from __future__ import annotations

from cairn.ops.arrivals import arrive
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import bits_of


@triton.jit
def cycles():
    """A multiprocessor's clock, int64."""
    asm: tl.constexpr = "mov.u64 $0, %clock64;"
    return tl.inline_asm_elementwise(asm, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def seat_of(tickets, programs, parts, places, LATE: tl.constexpr, ABREAST: tl.constexpr):
    """A program's row and part.

    With tickets programs sit in the order in which they begin. Those that begin fill team after
    team: the first team that is not done has all its members, or they are the next to begin, and
    no team behind it can take their places. Without, all of the launch have a place.

    The last of `programs` sets the tickets back: see `arrivals`.

    With LATE the second of a multiprocessor begins so many cycles after the first, and so on, up to
    the last of ABREAST: else all would read at the same time, and later all wait. There are
    `places` multiprocessors.
    """
    number = tl.program_id(0)
    if tickets is not None:
        number = tl.atomic_add(tickets, 1, sem="relaxed")
        if number == programs - 1:
            tl.store(tickets, 0)
        if LATE > 0:  # noqa: SIM102
            if number < ABREAST * places:
                now = cycles()
                begin = now + number // places * LATE
                while now < begin:
                    now = cycles()
    return (number // parts).to(tl.int64), number % parts


@triton.jit
def meet(arrivals, row, wanted, PARTS: tl.constexpr, APART: tl.constexpr):
    """Wait until the row's parts have arrived `wanted` times: what they stored before can then be
    loaded. A part alone waits for its own threads."""
    # What all threads stored is done before one of them says so.
    tl.debug_barrier()
    if PARTS > 1:
        arrivals += row * APART
        here = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
        while here < wanted:
            here = tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@triton.jit
def last_to_come(arrivals, row, wanted, PARTS: tl.constexpr, APART: tl.constexpr):
    """Whether all other parts of a row have arrived `wanted` times, as `meet` counts: what they
    stored before this part can load. Nobody waits."""
    last = wanted >= 0
    if PARTS > 1:
        last = arrive(arrivals + row * APART) == wanted - 1
    else:
        tl.debug_barrier()
    return last


@triton.jit
def leave(arrivals, row, parts, PARTS: tl.constexpr, APART: tl.constexpr):
    """End a part, which meets no other any more. The last of a row leaves its arrivals, and what
    else is counted beside them, as they were: see `arrivals`."""
    arrivals += row * APART
    last = parts == 1
    if PARTS > 1:
        last = tl.atomic_add(arrivals + 1, 1, sem="relaxed") == parts - 1
    if last:
        tl.store(arrivals + tl.arange(0, 4), tl.zeros([4], tl.int32))


@triton.jit
def of_parts(at, parts, other, PARTS: tl.constexpr):
    """What the parts of a row left at `at` [parts] before they met [PARTS]; `other` behind it."""
    p = tl.arange(0, PARTS)
    # Not from a cache of this multiprocessor alone.
    return tl.load(at + p, mask=p < parts, other=other, cache_modifier=".cg")


@triton.jit
def told(
    at, part, own, parts, other, arrivals, row, wanted, PARTS: tl.constexpr, APART: tl.constexpr
):
    """`of_parts`, after this part has left its own there and all have arrived `wanted` times."""
    tl.store(at + part, own)
    meet(arrivals, row, wanted, PARTS, APART)
    return of_parts(at, parts, other, PARTS)


@triton.jit
def number_of(key):
    """The float that `ordered` makes `key` of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def part_at(base, part, PART: tl.constexpr, ALIGN: tl.constexpr):
    """Where a part of a row `base` numbers behind an aligned address begins: aligned, int64, and
    its place in the row, int32, which may lie in front of the row."""
    shift = base % ALIGN
    return tl.multiple_of(base - shift + part * PART, ALIGN), part * PART - shift.to(tl.int32)


@triton.jit
def load_inside(x, i, begin, width, other, COUNT: tl.constexpr, INSIDE: tl.constexpr):
    """COUNT numbers of a row from the begin-th on, which lies at x, in the order of i; `other`
    beyond the row. INSIDE: none is beyond it."""
    whole = INSIDE
    if not INSIDE:
        whole = (begin >= 0) & (begin + COUNT <= width)
    if whole:
        value = tl.load(x + i)
    else:
        value = tl.load(x + i, mask=(i >= -begin) & (i < width - begin), other=other)
    return value


@triton.jit
def units_of(peak):
    """Two powers of two whose product brings a positive float32 to [2^42, 2^43): sums of 2^19 up to
    it fit int64."""
    shift = 169 - (bits_of(peak) >> 23)
    half = shift >> 1
    one = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return one, ((shift - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def total_of(sums, peak):
    """What results are divided by, from a sum in `units_of` the row's largest."""
    one, two = units_of(peak)
    total = sums.to(tl.float64) / one.to(tl.float64) / two.to(tl.float64)
    return tl.maximum(total.to(tl.float32), 1.1754943508222875e-38)


@triton.jit
def odd_total(peak_key):
    """The same of a row that is not finite, from `ordered` of its largest."""
    return tl.maximum(number_of(peak_key), 1.1754943508222875e-38)
