"""What is at least a share of a row's largest, by a team: see `teams` and `lines`."""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.lines import store_kept, survey_lines, total_from
from cairn.ops.sampling.kernels.teams import (
    leave,
    number_of,
    odd_total,
    part_at,
    seat_of,
    told,
)


@triton.jit(do_not_specialize=["programs"])
def min_p_kernel(
    x, min_p, out, tickets, arrivals, peaks, sums, stride, width, programs, parts, places,
    PARTS: tl.constexpr, HELD: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr,
    EACH: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr, LATE: tl.constexpr,
    ABREAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x where it is at least min_p of its row's largest, divided by the sum of
    these; else 0. peaks [n, parts] int32 and sums [n, parts] int64 are written."""
    PART: tl.constexpr = HELD * DEPTH * LINES * EACH
    await_previous(EARLY)
    row, part = seat_of(tickets, programs, parts, places, LATE, ABREAST)
    share = tl.load(min_p + row)
    at, begin = part_at(row * stride, part, PART, ALIGN)
    x += at
    tops, keys = survey_lines(x, begin, width, 0.0, HELD, DEPTH, LINES, EACH)
    own_peak = tl.max(keys, 0)
    peaks += row * parts
    peak_key = tl.max(told(peaks, part, own_peak, parts, 0, arrivals, row, parts, PARTS, APART), 0)
    peak = number_of(peak_key)
    threshold = 0.0
    if peak_key < 0x7F800000:
        least = share * peak
        threshold = tl.where(least > 0.0, least, 0.0)
        total = total_from(
            x, tops, threshold, peak, begin, width, row, part, parts, sums + row * parts,
            arrivals, 1, PARTS, APART, HELD, DEPTH, EACH,
        )  # fmt: skip
    else:
        total = odd_total(peak_key)
    at, _ = part_at(row * width, part, PART, ALIGN)
    store_kept(x, out + at, tops, threshold, total, False, begin, width, DEPTH, EACH, True)
    leave(arrivals, row, parts, PARTS, APART)
