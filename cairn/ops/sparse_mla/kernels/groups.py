"""Latent attention over lists of cells for Hopper: two warp groups multiply, a third gathers
records.

The multiplying warp groups divide the work as in `latent_groups_kernel` (dense decoding through a
page table). A third group of four warps copies the records of a token's list to shared memory, row
by row; an invalid cell becomes a row of zeros, whose logits are masked.
"""

from __future__ import annotations

from cairn.ops.attention.latent_wgmma import (
    hand_over,
    raised,
    risen,
    rounded,
    share_query,
    started,
    store_half,
    taken_over,
    whole,
)
from cairn.ops.gpu import constant, gl, gluon, hopper
from cairn.ops.wgmma import arrive, base_of, multiply, opaque_zero, scaled, summed

RISE = constant(0.0)
"""By how much (base 2) the largest logit must exceed the reference of the weights before it becomes
the reference; `latent_groups_kernel` has 8. With 0 the largest weight so far is always 1, which is
exact in 16 bits. With 8 the rounding of larger weights alone reaches 1.2 times the tests' tolerance
(computed in float32 for 75 tokens of 64 heads), with 0 it reaches 0.7."""


@gluon.jit
def cells_at(cells, position, length, capacity):
    """Cells at positions of a token's list; -1 beyond its length and for invalid cells."""
    cell = gl.load(cells + position, mask=position < length, other=-1)
    return gl.where(cell < capacity, cell, -1)


@gluon.jit
def copy_lines(
    cache, slot_stride, cells, first, length, capacity, column, tile, LAYOUT: gl.constexpr,
    LINES: gl.constexpr,
):  # fmt: skip
    """Start async copies of columns of the records at positions first .. of a list to the rows of a
    shared-memory tile; rows of invalid cells become zeros."""
    WIDTH: gl.constexpr = tile.shape[1]
    for part in gl.static_range(tile.shape[0] // LINES):
        position = first + part * LINES + gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT))
        cell = cells_at(cells, position, length, capacity)
        line = gl.where(cell >= 0, cell, 0).to(gl.int64) * slot_stride
        number = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        at = cache + line[:, None] + number[None, :]
        to = tile.slice(part * LINES, LINES, dim=0)
        hopper.async_copy.async_copy_global_to_shared(to, at, mask=(cell >= 0)[:, None])


@gluon.jit
def fetch(cache, slot_stride, cells, first, length, capacity, BYTES: gl.constexpr):
    """Prefetch 128 records of BYTES bytes each to L2."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    position = first + gl.arange(0, 128, layout=LINE)
    cell = cells_at(cells, position, length, capacity)
    line = gl.where(cell >= 0, cell, 0).to(gl.int64) * slot_stride
    at = (cache + line).to(gl.int64)
    asm: gl.constexpr = "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    for part in gl.static_range((BYTES + 127) // 128):
        place = at + part * 128
        gl.inline_asm_elementwise(asm, "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gather_blocks(
    cache, slot_stride, cached, cached_rope, full, free, cells, length, capacity, begin, pairs
):
    """Copy pairs of blocks from block `begin` on, one half at a time in the order in which the
    buffers become free.

    Args:
        cached: [4, slots, 256]: for each of the two blocks, the half whose values its warp group
            sums, then the other half.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = cached.shape[2]
    BYTES: gl.constexpr = 2 * (2 * HALF + cached_rope.shape[2])
    for pair in range(pairs):
        first = (begin + 2 * pair) * 64
        for which in gl.static_range(2):
            for half in gl.static_range(2):
                tile = 2 * which + half
                hopper.mbarrier.wait(free.index(tile), (pair & 1) ^ 1)
                place = first + which * 64
                if half == 0:
                    copy_lines(
                        cache, slot_stride, cells, place, length, capacity, 2 * HALF,
                        cached_rope.index(which), NARROW, 16,
                    )  # fmt: skip
                copy_lines(
                    cache, slot_stride, cells, place, length, capacity, HALF * (which ^ half),
                    cached.index(tile), WIDE, 16,
                )  # fmt: skip
                hopper.async_copy.commit_group()
        if pair + 1 < pairs:
            fetch(cache, slot_stride, cells, first + 128, length, capacity, BYTES)
        for tile in gl.static_range(4):
            hopper.async_copy.wait_group(3 - tile)
            hopper.fence_async_shared()
            arrive(full.index(tile))


@gluon.jit
def logits_of(
    rope, query, cached, cached_rope, full, phase, cells, first, length, capacity, factor, zero,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Wait for a block of the pair and compute its logits [heads, slots] in base 2.

    Args:
        rope: the query's last columns, in registers.
        first: the block's first position in the list of cells.
        zero: an `opaque_zero`.
    """
    LOGITS: gl.constexpr = rope.type.layout.parent
    SLOTS: gl.constexpr = cached.shape[1]
    position = first + gl.arange(0, SLOTS, layout=gl.SliceLayout(0, LOGITS))
    cell = cells_at(cells, position, length, capacity)
    own = cached.index(2 * WHICH + zero)
    rest = cached.index(2 * WHICH + 1 + zero)
    key = cached_rope.index(WHICH + zero)
    hopper.mbarrier.wait(full.index(2 * WHICH), phase)
    logits = gl.zeros([64, SLOTS], gl.float32, layout=LOGITS)
    logits = multiply(query.index(WHICH + zero), own.permute((1, 0)), logits)
    hopper.mbarrier.wait(full.index(2 * WHICH + 1), phase)
    logits = multiply(query.index(1 - WHICH + zero), rest.permute((1, 0)), logits)
    # Added last, so that the many products before do not round a large contribution of these few
    # again.
    logits = multiply(rope, key.permute((1, 0)), logits)
    logits = hopper.warpgroup_mma_wait(0, deps=[logits]) * factor
    return gl.where((cell >= 0)[None, :], logits, float("-inf"))


@gluon.jit
def first_group(
    query, cached, cached_rope, exchange, sums, full, free, sync,
    source, head_stride, o, lse, place, step, alive, factor, begin, pairs, length, cells, capacity,
):  # fmt: skip
    """The left half of the columns, and the weights of each pair's first block."""
    rope, base, total, acc = started(source + 512, head_stride, alive)
    share_query(source, head_stride, alive, query.index(0), sync.index(0))
    weights, _, _, _ = exchange
    ROWS: gl.constexpr = total.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for pair in range(pairs):
        phase = pair & 1
        zero = opaque_zero(pair)
        at = (begin + 2 * pair) * 64
        logits = logits_of(
            rope, query, cached, cached_rope, full, phase, cells, at, length, capacity, factor,
            zero, 0,
        )  # fmt: skip
        higher, changed = risen(base, logits, RISE)
        weight, summand = rounded(gl.exp2(logits - base_of(higher)[:, None]), cached)
        hand_over(exchange, weight, higher, changed, 0)
        acc, total = raised(acc, total, base, higher, changed)
        total = total + gl.sum(summand, 1)
        own = gl.convert_layout(weight, WEIGHTS)
        acc = multiply(own, cached.index(zero), acc)
        base, changed = taken_over(exchange, phase, 1, ROWS)
        acc = summed(acc, free.index(0))
        acc, total = raised(acc, total, higher, base, changed)
        acc = summed(multiply(weights.index(1 + zero), cached.index(3 + zero), acc), free.index(3))
    total = whole(total, sums, sync, 0)
    none = total == 0.0
    logs = (base + gl.log2(gl.where(none, 1.0, total))) * 0.6931471805599453
    row = gl.arange(0, 64, layout=ROWS)
    gl.store(lse + place + row * step, gl.where(none, float("-inf"), logs), mask=row < alive)
    store_half(o, scaled(acc, 1.0 / gl.where(none, 1.0, total)), 0, place, step, alive)


@gluon.jit
def second_group(
    query, cached, cached_rope, exchange, sums, full, free, sync,
    source, head_stride, o, lse, place, step, alive, factor, begin, pairs, length, cells, capacity,
):  # fmt: skip
    """The right half of the columns, and the weights of each pair's second block."""
    rope, base, total, acc = started(source + 512, head_stride, alive)
    share_query(source + 256, head_stride, alive, query.index(1), sync.index(0))
    weights, _, _, _ = exchange
    ROWS: gl.constexpr = total.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for pair in range(pairs):
        phase = pair & 1
        zero = opaque_zero(pair)
        at = (begin + 2 * pair + 1) * 64
        logits = logits_of(
            rope, query, cached, cached_rope, full, phase, cells, at, length, capacity, factor,
            zero, 1,
        )  # fmt: skip
        higher, changed = taken_over(exchange, phase, 0, ROWS)
        acc, total = raised(acc, total, base, higher, changed)
        # Use the other group's weights first, which frees its block.
        acc = multiply(weights.index(zero), cached.index(1 + zero), acc)
        base, changed = risen(higher, logits, RISE)
        weight, summand = rounded(gl.exp2(logits - base_of(base)[:, None]), cached)
        hand_over(exchange, weight, base, changed, 1)
        acc = summed(acc, free.index(1))
        acc, total = raised(acc, total, higher, base, changed)
        total = total + gl.sum(summand, 1)
        own = gl.convert_layout(weight, WEIGHTS)
        acc = summed(multiply(own, cached.index(2 + zero), acc), free.index(2))
    total = whole(total, sums, sync, 1)
    store_half(o, scaled(acc, 1.0 / gl.where(total == 0.0, 1.0, total)), 256, place, step, alive)


@gluon.jit
def cells_groups_kernel(
    q, cache, cells, lengths, o, lse, most, capacity, scale,
    q_token, q_head, slot_stride, cells_stride,
    HEADS: gl.constexpr,
):  # fmt: skip
    """As `accumulate_kernel` over lists of cells, for records of 512 + 64 elements with one stride.
    A program handles 64 heads of a token; programs of one token are adjacent, so that the second
    reads records from L2.

    Args:
        most: cells per list; capacity: cells of the cache.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    COLUMNS: gl.constexpr = (HEADS + 63) // 64
    token = (gl.program_id(0) // COLUMNS).to(gl.int64)
    head = gl.program_id(0) % COLUMNS * 64
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    length = gl.minimum(gl.load(lengths + token).to(gl.int32), most)
    blocks = gl.cdiv(gl.maximum(length, 0), 64)
    each = gl.cdiv(gl.cdiv(blocks, 2), splits) * 2
    begin = gl.minimum(split * each, blocks)
    pairs = gl.cdiv(gl.minimum(each, blocks - begin), 2)
    alive = HEADS - head

    dtype: gl.constexpr = q.dtype.element_ty
    query = gl.allocate_shared_memory(dtype, [2, 64, 256], TILE)
    cached = gl.allocate_shared_memory(dtype, [4, 64, 256], TILE)
    cached_rope = gl.allocate_shared_memory(dtype, [2, 64, 64], TILE)
    weights = gl.allocate_shared_memory(dtype, [2, 64, 64], TILE)
    bases = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    changes = gl.allocate_shared_memory(gl.int32, [2, 1], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], SIGNAL)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], SIGNAL)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], SIGNAL)
    sync = gl.allocate_shared_memory(gl.int64, [2, 1], SIGNAL)
    for half in gl.static_range(4):
        hopper.mbarrier.init(full.index(half), 1)
        hopper.mbarrier.init(free.index(half), 1)
    for signal in gl.static_range(2):
        hopper.mbarrier.init(ready.index(signal), 1)
        hopper.mbarrier.init(sync.index(signal), 2)
    hopper.fence_async_shared()

    place = (token * HEADS + head) * splits + split
    source = q + token * q_token + head * q_head
    own = cells + token * cells_stride
    exchange = (weights, bases, changes, ready)
    shared = (query, cached, cached_rope, exchange, sums, full, free, sync)
    task = (source, q_head, o, lse, place, splits, alive, scale * 1.4426950408889634)
    where = (begin, pairs, length, own, capacity)
    listed = (full, free, own, length, capacity, begin, pairs)
    records = (cache, slot_stride, cached, cached_rope)
    gl.warp_specialize(
        [
            (first_group, shared + task + where),
            (second_group, shared + task + where),
            (gather_blocks, records + listed),
        ],
        [4, 4],
        [232, 40],
    )
