"""What is at least a share of a row's largest, by a team: see `teams`."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.teams import (
    fetch_later,
    leave,
    load_part,
    number_of,
    odd_total,
    peak_key_of,
    seat_of,
    store_shares,
    told,
    tops_of,
    total_of_parts,
)


@triton.jit(do_not_specialize=["programs"])
def min_p_kernel(
    x, min_p, out, tickets, arrivals, peaks, sums, stride, width, programs, parts, places,
    PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr, LINES: tl.constexpr,
    APART: tl.constexpr, ALIGN: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """out [n, width] = x where it is at least min_p of its row's largest, divided by the sum of
    these; else 0. peaks [n, parts] int32 and sums [n, parts] int64 are written."""
    row, part = seat_of(tickets, programs, parts, places, LATE)
    share = tl.load(min_p + row)
    pieces = load_part(x, row, part, stride, width, 0.0, PART, PIECE, ALIGN)
    if tickets is not None:
        fetch_later(x, row, part, stride, width, programs, parts, places, PART, LINES, ALIGN)
    own_peak = tl.max(tops_of(pieces, LINES), 0)
    keys = told(
        peaks + row * parts, part, peak_key_of(pieces, own_peak, LINES), parts, 0,
        arrivals, row, parts, PARTS, APART,
    )  # fmt: skip
    peak_key = tl.max(keys, 0)
    peak = number_of(peak_key)
    threshold = 0.0
    if peak_key < 0x7F800000:
        least = share * peak
        threshold = tl.where(least > 0.0, least, 0.0)
        total = total_of_parts(
            pieces, threshold, own_peak, peak, row, part, parts, sums + row * parts, arrivals, 1,
            PARTS, APART, LINES,
        )  # fmt: skip
    else:
        total = odd_total(peak_key)
    store_shares(out, row, part, width, pieces, threshold, total, PART, PIECE, ALIGN)
    leave(arrivals, row, parts, PARTS, APART)
