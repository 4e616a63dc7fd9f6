"""The k-th largest of any numbers, as in `filters`: lines' maxima bound it, few numbers are listed.

Numbers are listed as float32 whose bits are the distance from the row's bound, in the order of
floats: 1 and more, cut off where the k-th largest cannot be.
"""

from __future__ import annotations

from cairn.ops.attention.kernels import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.blocks import aligned_block
from cairn.ops.sampling.kernels.filters import (
    filters_of,
    load_head,
    ordered,
    search,
    store_tops,
)
from cairn.ops.sampling.kernels.lists import (
    keep_hits,
    list_chunk,
    list_lines,
    place_of,
    reached_by,
    square_of,
)


@triton.jit
def distance(value, bound):
    """int32, 1 and more from the bound on, 0 below; bound is int32 of the order of `ordered`."""
    ahead = ordered(value).to(tl.int64) - bound.to(tl.int64)
    return (tl.minimum(tl.maximum(ahead, -1), 0x7FFFFFFD) + 1).to(tl.int32)


@triton.jit
def lines_kernel(
    x, top_k, tops, positives, stride, width, chunks,
    CHUNK: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of each chunk of limited rows: the maximum of every line, tops [n, chunks, CHUNK / LINE]
    float32 (infinity for NaN), and how many are 0 and more (NaN too), positives [n, chunks]
    int32."""
    await_previous(EARLY)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k, _, _ = filters_of(top_k, None, None, row, width)
    if k > 0:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = place < width
        value = tl.load(x + row * stride + place, mask=inside, other=float("-inf")).to(tl.float32)
        positive = (value >= 0.0) | (value != value)
        at = row * chunks + chunk
        tl.store(positives + at, tl.sum(positive.to(tl.int32), 0))
        store_tops(tops, at, tl.where(value != value, float("inf"), value), CHUNK, LINE)


@triton.jit
def list_kernel(
    x, top_k, tops, positives, bounds, counts, weights, stride, width, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Lists a limited row's numbers from a bound on that k of them reach, as `collect_kernel` does.

    bounds [n] int32; counts [n, 2, CHUNKS] int32; weights [n, CHUNKS, CHUNK]: `distance` as
    float32.
    """
    await_previous(EARLY)
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k, _, _ = filters_of(top_k, None, None, row, width)
    if k > 0:
        c = tl.arange(0, CHUNKS)
        positive = tl.load(positives + row * chunks + c, mask=c < chunks, other=0)
        # -inf in the order, or 0 where the k-th largest is not below.
        bound = tl.where(tl.sum(positive, 0) >= k, 0, -2139095041)
        counts += row * 2 * CHUNKS
        weights += row * CHUNKS * CHUNK
        lines = chunks * (CHUNK // LINE)
        i = tl.arange(0, CHUNKS * CHUNK // LINE)
        top = tl.load(tops + row * lines + i, mask=i < lines, other=float("-inf"))
        near = tl.where(i < lines, distance(top, bound), 0)
        reach = tl.full([], 1, tl.int32)
        if k <= lines:
            reach = tl.maximum(reached_by(near, k, k + k // 8), 1)
        bound += reach - 1
        hit = near >= reach
        found = tl.sum(hit.to(tl.int32), 0)
        by_chunk = (k > lines) | (found > CHUNKS)
        if program == 0:
            tl.store(bounds + row, bound)
            if by_chunk:
                tl.store(counts + c, c * 0, mask=c >= chunks)
            else:
                keep_hits(hit, counts, CHUNKS)
                for begin in range(0, found, CHUNKS // 2):
                    s = begin + tl.arange(0, CHUNKS // 2)
                    line = tl.load(counts + CHUNKS + s, mask=s < found, other=0)
                    place = place_of(line[:, None], tl.arange(0, LINE)[None, :], CHUNK, LINE)
                    inside = (s < found)[:, None] & (place < width)
                    value = tl.load(x + row * stride + place, mask=inside, other=0.0)
                    far = tl.where(inside, distance(value.to(tl.float32), bound), 0)
                    weight = far.to(tl.float32, bitcast=True)
                    list_lines(weights, counts, s, weight, far > 0, CHUNK)
        if by_chunk:
            for chunk in range(program, chunks, tl.num_programs(0)):
                place = square_of(chunk, CHUNK)
                inside = place < width
                value = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
                far = tl.where(inside, distance(value, bound), 0)
                weight = far.to(tl.float32, bitcast=True)
                list_chunk(weights + chunk * CHUNK, counts + chunk, weight, far > 0)


@triton.jit
def kth_kernel(
    top_k, bounds, counts, weights, thresholds, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """thresholds [n] int32: what the k largest reach, in the order of `ordered`; -2^31: all."""
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    k, _, _ = filters_of(top_k, None, None, row, width)
    threshold = tl.full([], -2147483648, tl.int32)
    if k > 0:
        c = tl.arange(0, CHUNKS)
        weights += row * CHUNKS * CHUNK
        count = tl.load(counts + row * 2 * CHUNKS + c)
        head = load_head(weights, count, CHUNK, WIDTH)
        listed = tl.sum(count, 0).to(tl.int64)
        low = tl.full([], 1, tl.int32)
        end = tl.full([], 0x7FFFFFFF, tl.int32)
        if listed > k:
            above = tl.full([CHUNKS], 0.0, tl.float64)
            low = search(
                weights, head, count, tl.max(count, 0), low, end, listed, k, above, False, CHUNK
            )[0]
        threshold = tl.load(bounds + row) + (low - 1)
    tl.store(thresholds + row, threshold)


@triton.jit
def masked(logits, out, place, threshold, width, WHOLE: tl.constexpr):
    """out = logits that reach the threshold, the others -inf."""
    inside = None if WHOLE else (place >= 0) & (place < width)
    value = tl.load(logits, mask=inside)
    # NaN reaches nothing.
    kept = (ordered(value) >= threshold) & (value == value)
    kept = kept | (threshold == -2147483648)
    tl.store(out, tl.where(kept, value, float("-inf")), mask=inside)


@triton.jit
def mask_kernel(
    logits, thresholds, out, stride, width,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [n, width] = what reaches the row's threshold; the others -inf."""
    await_previous(EARLY)
    row = tl.program_id(1).to(tl.int64)
    threshold = tl.load(thresholds + row)
    block = tl.program_id(0)
    at, place, whole = aligned_block(row * stride, block, width, BLOCK, ALIGN)
    to, _, _ = aligned_block(row * width, block, width, BLOCK, ALIGN)
    i = tl.arange(0, BLOCK)
    if whole:
        masked(logits + at + i, out + to + i, place, threshold, width, True)
    else:
        masked(logits + at + i, out + to + i, place, threshold, width, False)
