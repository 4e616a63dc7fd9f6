"""Kernels that sort (token, expert) pairs by expert (stable).

Pair p = t * k + j is token t with its j-th expert. Its bucket is ids[p] + FIRST; pairs with buckets
outside of 0 .. buckets - 1 get no row. A bucket's rows begin at a multiple of `block`.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous


@triton.jit
def buckets_of(ids, pair, pairs, buckets, FIRST: tl.constexpr):
    """Buckets of pairs; `buckets` for pairs without one."""
    bucket = tl.load(ids + pair, mask=pair < pairs, other=-1 - FIRST).to(tl.int32) + FIRST
    return tl.where((bucket >= 0) & (bucket < buckets), bucket, buckets)


@triton.jit
def ranks_within(ids, pair, bucket, first, pairs, buckets, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Rank of each pair within its bucket: the number of earlier pairs with the same bucket in the
    chunk that begins at `first`."""
    size: tl.constexpr = bucket.shape[0]
    rank = tl.zeros((size,), tl.int32)
    for begin in range(0, size, STEP):
        other = first + begin + tl.arange(0, STEP)
        same = buckets_of(ids, other, pairs, buckets, FIRST)[None, :] == bucket[:, None]
        rank += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    return rank


@triton.jit
def store_begins(
    count, begins, used, sizes1, sizes2, scale_begins, buckets, block, n, k, SCALES: tl.constexpr
):
    """Store the outputs that follow from the number of pairs of each bucket; see `sort_kernel`."""
    bucket = tl.arange(0, count.shape[0])
    inside = bucket < buckets
    count = tl.where(inside, count, 0)
    padded = (count + block - 1) // block * block
    end = tl.cumsum(padded, 0)
    tl.store(begins + bucket, end - padded, mask=inside)
    tl.store(begins + bucket + 1, end, mask=bucket == buckets - 1)
    if used is not None:
        tl.store(used, tl.sum(padded, 0))
    if sizes1 is not None:
        tl.store(sizes1 + bucket * 3, count, mask=inside)
        tl.store(sizes1 + bucket * 3 + 1, 2 * n + bucket * 0, mask=inside)
        tl.store(sizes1 + bucket * 3 + 2, k + bucket * 0, mask=inside)
        tl.store(sizes2 + bucket * 3, count, mask=inside)
        tl.store(sizes2 + bucket * 3 + 1, k + bucket * 0, mask=inside)
        tl.store(sizes2 + bucket * 3 + 2, n + bucket * 0, mask=inside)
    if scale_begins is not None:
        whole = (count + SCALES - 1) // SCALES * SCALES
        end = tl.cumsum(whole, 0)
        tl.store(scale_begins + bucket, end - whole, mask=inside)
        tl.store(scale_begins + bucket + 1, end, mask=bucket == buckets - 1)


@triton.jit
def store_rows(
    pair, bucket, row, order, owners, inverse, buckets, block, share, FIRST: tl.constexpr
):
    """Store the rows of pairs; see `sort_kernel`."""
    known = bucket < buckets
    tl.store(order + row, pair // share, mask=known)
    if owners is not None:
        tl.store(owners + row // block, bucket - FIRST, mask=known & (row % block == 0))
    if inverse is not None:
        tl.store(inverse + pair, row, mask=known)


@triton.jit
def fill(out, count, value, program, programs, BLOCK: tl.constexpr):
    """out[:count] = value, by all programs."""
    at = program * BLOCK + tl.arange(0, BLOCK)
    for _ in range(0, count, programs * BLOCK):
        tl.store(out + at, value + at * 0, mask=at < count)
        at += programs * BLOCK


@triton.jit
def fill_padding(
    order, count, begin, used, room, value, block, program, programs, BLOCK: tl.constexpr
):
    """Write `value` to the padding rows of `order`: after the pairs of each bucket, and from `used`
    on."""
    bucket = tl.arange(0, count.shape[0])
    for number in range(program, count.shape[0], programs):
        own = tl.sum(tl.where(bucket == number, count, 0), 0)
        first = tl.sum(tl.where(bucket == number, begin, 0), 0)
        last = first + (own + block - 1) // block * block
        for row in range(first + own, last, BLOCK):
            at = row + tl.arange(0, BLOCK)
            tl.store(order + at, value + at * 0, mask=at < last)
    for row in range(used + program * BLOCK, room, programs * BLOCK):
        at = row + tl.arange(0, BLOCK)
        tl.store(order + at, value + at * 0, mask=at < room)


@triton.jit(early=(), do_not_specialize=["pairs", "room"])
def sort_kernel(
    ids, order, begins, used, owners, inverse, sizes1, sizes2, scale_begins,
    pairs, room, buckets, block, share, n, k,
    C: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, FIRST: tl.constexpr,
    FILLED: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program counts all pairs, at most C, and stores the rows of ROWS of them.

    Args:
        ids: [pairs] int32 or int64.
        order: [room], written: pair // share at the row of each pair; FILLED: `pairs` in all other
            rows.
        begins: [buckets + 1], written: the first row of each bucket, and the end.
        used: [1] or None, written: rows in use.
        owners: written: bucket - FIRST of every block of rows in use; or None.
        inverse: [pairs] or None, written: the row of each pair.
        sizes1, sizes2: [buckets, 3] or None, written: (pairs, 2n, k) and (pairs, k, n).
        scale_begins: as `begins`, with buckets padded to SCALES rows; or None.
        PDL: as in `await_previous`.
    """
    await_previous(PDL)
    program = tl.program_id(0)
    other = tl.arange(0, C)
    of_other = buckets_of(ids, other, pairs, buckets, FIRST)
    number = tl.arange(0, BP)
    count = tl.where(number < buckets, tl.histogram(of_other, BP), 0)
    if program == 0:
        store_begins(
            count, begins, used, sizes1, sizes2, scale_begins, buckets, block, n, k, SCALES
        )
    padded = (count + block - 1) // block * block
    begin = tl.cumsum(padded, 0) - padded
    pair = program * ROWS + tl.arange(0, ROWS)
    bucket = buckets_of(ids, pair, pairs, buckets, FIRST)
    earlier = (of_other[None, :] == bucket[:, None]) & (other[None, :] < pair[:, None])
    row = tl.sum(tl.where(number[None, :] == bucket[:, None], begin[None, :], 0), 1)
    row += tl.sum(earlier.to(tl.int32), 1)
    store_rows(pair, bucket, row, order, owners, inverse, buckets, block, share, FIRST)
    if FILLED:
        fill_padding(
            order, count, begin, tl.sum(padded, 0), room, pairs, block, program,
            tl.num_programs(0), BP,
        )  # fmt: skip


@triton.jit(early=(), do_not_specialize=["pairs", "room"])
def count_kernel(
    ids, counts, order, pairs, room, buckets,
    C: tl.constexpr, BP: tl.constexpr, FIRST: tl.constexpr, FILLED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """counts[chunk] [BP] = number of pairs of each bucket in a chunk of C pairs. Other arguments as
    in `sort_kernel`."""
    await_previous(PDL)
    chunk = tl.program_id(0)
    bucket = buckets_of(ids, chunk * C + tl.arange(0, C), pairs, buckets, FIRST)
    at = chunk.to(tl.int64) * BP + tl.arange(0, BP)
    tl.store(counts + at, tl.histogram(bucket, BP))
    if FILLED:
        fill(order, room, pairs, chunk, tl.num_programs(0), C)


@triton.jit(early=(), do_not_specialize=["chunks"])
def begins_kernel(
    counts, begins, used, sizes1, sizes2, scale_begins, chunks, buckets, block, n, k,
    T: tl.constexpr, BP: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replace counts [chunks, BP] by their exclusive prefix sums over chunks, T chunks at a time;
    then write begins, used and sizes as in `sort_kernel`."""
    await_previous(PDL)
    before = tl.zeros((BP,), tl.int32)
    for first in range(0, chunks, T):
        chunk = first + tl.arange(0, T)
        at = counts + chunk.to(tl.int64)[:, None] * BP + tl.arange(0, BP)[None, :]
        count = tl.load(at, mask=(chunk < chunks)[:, None], other=0)
        sums = tl.cumsum(count, 0)
        tl.store(at, before[None, :] + sums - count, mask=(chunk < chunks)[:, None])
        before += tl.sum(count, 0)
    store_begins(before, begins, used, sizes1, sizes2, scale_begins, buckets, block, n, k, SCALES)


@triton.jit(early=(), do_not_specialize=["pairs"])
def place_kernel(
    ids, counts, begins, order, owners, inverse, pairs, buckets, block, share,
    C: tl.constexpr, BP: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the rows of a chunk of C pairs. Arguments as in `sort_kernel`."""
    await_previous(PDL)
    chunk = tl.program_id(0)
    pair = chunk * C + tl.arange(0, C)
    bucket = buckets_of(ids, pair, pairs, buckets, FIRST)
    rank = ranks_within(ids, pair, bucket, chunk * C, pairs, buckets, FIRST, STEP)
    known = bucket < buckets
    row = tl.load(begins + bucket, mask=known, other=0) + rank
    row += tl.load(counts + chunk.to(tl.int64) * BP + bucket, mask=known, other=0)
    store_rows(pair, bucket, row, order, owners, inverse, buckets, block, share, FIRST)


@triton.jit(early=())
def tiles_kernel(
    sizes, offsets, owners, begins, ends, used, experts, size_stride,
    BM: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Cut the rows offsets[e] .. offsets[e] + sizes[e, 0] - 1 of every expert into tiles of at most
    BM rows.

    owners, begins, ends: written for each tile: its expert, its first row, and the end of the
    expert's rows. used [1]: BM times the number of tiles. PDL: as in `await_previous`.
    """
    await_previous(PDL)
    expert = tl.arange(0, EP)
    inside = expert < experts
    count = tl.load(sizes + expert * size_stride, mask=inside, other=0)
    first = tl.load(offsets + expert, mask=inside, other=0)
    tiles = (count + BM - 1) // BM
    tile = tl.cumsum(tiles, 0) - tiles
    tl.store(used, tl.sum(tiles, 0) * BM)
    for number in range(tl.max(tiles, 0)):
        there = number < tiles
        tl.store(owners + tile + number, expert, mask=there)
        tl.store(begins + tile + number, first + number * BM, mask=there)
        tl.store(ends + tile + number, first + count, mask=there)
