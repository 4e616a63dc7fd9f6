"""Kernel of the vertical-slash conversion: a lane for every row block."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def ahead(slashes, n, bound, CHUNK: tl.constexpr):
    """How many of the n slashes reach bound [L]."""
    found = tl.zeros_like(bound)
    for begin in range(0, n, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        slash = tl.load(slashes + at, mask=at < n, other=-2147483648)
        found += tl.sum((slash[None, :] >= bound[:, None]).to(tl.int32), 1)
    return found


@triton.jit
def advance(moving, slashes, next, low, high, follow, count, end, kv, blocks, m, n):
    """Go on by a slash in the lanes that are moving: see `cairn.ops.sparse.vertical_slash`."""
    x = tl.maximum(end - tl.load(slashes + next, mask=moving, other=0), m)
    opens = moving & (x > high + m)
    grows = moving & (x > high) & (x <= high + m)
    low = tl.where(opens, x - m, low)
    high = tl.where(opens, x, tl.where(grows, high + m, high))
    follow = tl.where(opens, low, follow)
    adds = (opens | grows) & (follow < tl.minimum(high, kv))
    tl.store(blocks + count, follow, mask=adds)
    count += adds.to(tl.int32)
    follow += tl.where(adds, n, 0)
    return next + moving.to(tl.int32), low, high, follow, count


@triton.jit
def any_of(lanes):
    """Whether one of the lanes is true."""
    return tl.max(lanes.to(tl.int32), 0) > 0


@triton.jit
def convert_kernel(
    q_seqlens, kv_seqlens, verticals, slashes, vertical_counts, slash_counts,
    block_count, block_offset, column_count, column_index,
    heads, row_blocks, nv, ns, m, n,
    CAUSAL: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """L row blocks of a head. The tables are zero before."""
    line = tl.program_id(1).to(tl.int64)
    q = tl.load(q_seqlens + line // heads)
    kv = tl.load(kv_seqlens + line // heads)
    verticals += line * nv
    slashes += line * ns
    v_used = nv
    s_used = ns
    if vertical_counts is not None:
        v_used = tl.load(vertical_counts + line % heads)
    if slash_counts is not None:
        s_used = tl.load(slash_counts + line % heads)
    block = tl.program_id(0) * L + tl.arange(0, L)
    start = block * m
    alive = (block < row_blocks) & (start < q)
    place = line * row_blocks + block
    blocks = block_offset + place * ns
    columns = column_index + place * nv
    if CAUSAL:
        end = start + m + kv - q
        behind = end
    else:
        end = start + m + kv
        behind = tl.zeros_like(start) + kv
    first = tl.minimum(ahead(slashes, s_used, end, CHUNK), tl.maximum(s_used - 1, 0))
    until = tl.zeros_like(start) + s_used
    if not CAUSAL:
        until = ahead(slashes, s_used, start, CHUNK)
    own = tl.load(slashes + first, mask=alive, other=0)
    bare = (own > end) | (s_used == 0)
    high = tl.maximum(end - own, m)
    low = tl.where(bare, behind, high - m)
    high = tl.where(bare, behind + n, high)
    adds = alive & (low < tl.minimum(high, kv))
    tl.store(blocks, low, mask=adds)
    count = adds.to(tl.int32)
    follow = low + tl.where(adds, n, 0)
    next = first + 1
    listed = tl.zeros_like(count)
    for j in range(v_used):
        vertical = tl.load(verticals + j)
        moving = alive & (high <= vertical) & (next < until)
        while any_of(moving):
            next, low, high, follow, count = advance(
                moving, slashes, next, low, high, follow, count, end, kv, blocks, m, n
            )
            moving = alive & (high <= vertical) & (next < until)
        column = alive & (vertical < low)
        if not CAUSAL:
            column = alive & tl.where(high <= vertical, vertical < kv, vertical < low)
        else:
            column = column & (vertical < high)
        tl.store(columns + listed, tl.zeros_like(listed) + vertical, mask=column)
        listed += column.to(tl.int32)
    moving = alive & (next < until)
    while any_of(moving):
        next, low, high, follow, count = advance(
            moving, slashes, next, low, high, follow, count, end, kv, blocks, m, n
        )
        moving = alive & (next < until)
    tl.store(block_count + place, count, mask=alive)
    tl.store(column_count + place, listed, mask=alive)
