"""MLA's decode attention for Hopper: groups of warps that take turns at the tensor cores.

The sums of 64 heads fill the registers of two groups of four warps, each of which holds half of
their columns. Blocks of slots come in pairs. A group finds the weights of one block of a pair and
hands them to the other, so that each adds both blocks to its columns: while one is at exponents,
the other multiplies. One more warp has blocks copied ahead.

The division of work is FlashMLA's (DeepSeek, "A Deep-Dive Into the New Flash MLA Kernel", 2025).
"""

from __future__ import annotations

from cairn.ops.attention.groups import base_of, clear, copy, multiply, scaled, summed, tell
from cairn.ops.gpu import gl, gluon, hopper


@gluon.jit
def copy_blocks(
    values, keys, cached, cached_rope, full, free, table, page_lines, begin, pairs, last,
    SIZE: gl.constexpr,
):  # fmt: skip
    """Copy pairs of blocks from number `begin` on, halves of them in the order they become free.

    Args:
        cached: [4, slots, 256]: of each block the half that its group sums, then the other.
        last: the row's last block; it is copied in place of one behind it.
    """
    SLOTS: gl.constexpr = cached.shape[1]
    HALF: gl.constexpr = cached.shape[2]
    ROPE: gl.constexpr = cached_rope.shape[2]
    BYTES: gl.constexpr = cached.dtype.primitive_bitwidth // 8
    for pair in range(pairs):
        block = begin + 2 * pair
        first = line_of(block, table, page_lines, SLOTS, SIZE)
        second = line_of(gl.minimum(block + 1, last), table, page_lines, SLOTS, SIZE)
        for half in gl.static_range(2):
            for which in gl.static_range(2):
                line = first if which == 0 else second
                tile = 2 * which + half
                hopper.mbarrier.wait(free.index(tile), (pair & 1) ^ 1)
                if half == 0:
                    hopper.mbarrier.expect(full.index(tile), SLOTS * (HALF + ROPE) * BYTES)
                    copy(keys, [line, 0], full.index(tile), cached_rope.index(which))
                else:
                    hopper.mbarrier.expect(full.index(tile), SLOTS * HALF * BYTES)
                copy(values, [line, HALF * (which ^ half)], full.index(tile), cached.index(tile))


@gluon.jit
def line_of(block, table, page_lines, SLOTS: gl.constexpr, SIZE: gl.constexpr):
    """A block's first line in the tables, through the page table."""
    IN_PAGE: gl.constexpr = SIZE // SLOTS
    return gl.load(table + block // IN_PAGE) * page_lines + block % IN_PAGE * SLOTS


@gluon.jit
def query_of(source, head_stride, alive, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, WIDTH] columns of a query's heads; zeros from head `alive` on."""
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = source + (head * head_stride)[:, None] + column[None, :]
    return gl.load(at, mask=(head < alive)[:, None], other=0.0)


@gluon.jit
def share_query(source, head_stride, alive, tile, met):
    """Fill a tile with columns of a query, and wait for the other group's."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = tile.shape[1]
    tile.store(query_of(source, head_stride, alive, WIDTH, LINES))
    hopper.fence_async_shared()
    meet(met)


@gluon.jit
def meet(met):
    """Wait until both groups are here, and what they have stored is seen."""
    tell(met)
    hopper.mbarrier.wait(met, 0)


@gluon.jit
def logits_of(rope, query, cached, key, full, phase, inside, factor, WHICH: gl.constexpr):
    """Logits [heads, slots] to base 2 with a block of the pair, once it is there.

    Args:
        rope: the query's last columns, in registers.
        inside: slots of the block that the row has; others are cleared.
    """
    LOGITS: gl.constexpr = rope.type.layout.parent
    SLOTS: gl.constexpr = cached.shape[1]
    own = cached.index(2 * WHICH)
    rest = cached.index(2 * WHICH + 1)
    hopper.mbarrier.wait(full.index(2 * WHICH), phase)
    if inside < SLOTS:
        hopper.mbarrier.wait(full.index(2 * WHICH + 1), phase)
        clear(own, inside)
        clear(rest, inside)
        hopper.fence_async_shared()
    logits = gl.zeros([64, SLOTS], gl.float32, layout=LOGITS)
    logits = multiply(rope, key.permute((1, 0)), logits)
    logits = multiply(query.index(WHICH), own.permute((1, 0)), logits)
    hopper.mbarrier.wait(full.index(2 * WHICH + 1), phase)
    logits = multiply(query.index(1 - WHICH), rest.permute((1, 0)), logits)
    logits = hopper.warpgroup_mma_wait(0, deps=[logits]) * factor
    if inside < SLOTS:
        slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, LOGITS))
        logits = gl.where((slot < inside)[None, :], logits, float("-inf"))
    return logits


@gluon.jit
def hand_over(weights, tile, signal):
    """Give the other group a block's weights."""
    tile.store(weights.to(tile.dtype))
    hopper.fence_async_shared()
    tell(signal)


@gluon.jit
def started(pe, pe_head, alive):
    """(the query's last columns, maxima, sums of weights, sums of values), in registers."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    rope = query_of(pe, pe_head, alive, 64, gl.DotOperandLayout(0, LOGITS, 2))
    highest = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
    total = gl.zeros([64], gl.float32, layout=ROWS)
    return rope, highest, total, gl.zeros([64, 256], gl.float32, layout=SUMS)


@gluon.jit
def first_group(
    query, cached, cached_rope, weights, best, sums, full, free, ready, met,
    nope, nope_head, pe, pe_head, o, lse, place, step, alive, factor, begin, pairs, length,
):  # fmt: skip
    """The left half of the columns, and the weights of each pair's first block."""
    rope, highest, total, acc = started(pe, pe_head, alive)
    share_query(nope, nope_head, alive, query.index(0), met.index(0))
    ROWS: gl.constexpr = total.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for pair in range(pairs):
        phase = pair & 1
        inside = length - (begin + 2 * pair) * 64
        key = cached_rope.index(0)
        logits = logits_of(rope, query, cached, key, full, phase, inside, factor, 0)
        higher = gl.maximum(highest, gl.max(logits, 1))
        best.index(0).store(higher)
        tell(ready.index(0))
        base = base_of(higher)
        weight = gl.exp2(logits - base[:, None])
        decay = gl.exp2(highest - base)
        total = total * decay + gl.sum(weight, 1)
        own = gl.convert_layout(weight.to(cached.dtype), WEIGHTS)
        acc = multiply(own, cached.index(0), scaled(acc, decay))
        hopper.mbarrier.wait(ready.index(1), phase)
        highest = best.index(1).load(ROWS)
        decay = gl.exp2(higher - base_of(highest))
        total = total * decay
        hand_over(weight * decay[:, None], weights.index(0), ready.index(2))
        acc = scaled(summed(acc, free.index(0)), decay)
        acc = summed(multiply(weights.index(1), cached.index(3), acc), free.index(3))
    total = whole(total, sums, met, 0)
    none = total == 0.0
    logs = (highest + gl.log2(gl.where(none, 1.0, total))) * 0.6931471805599453
    row = gl.arange(0, 64, layout=ROWS)
    gl.store(lse + place + row * step, gl.where(none, float("-inf"), logs), mask=row < alive)
    store_half(o, scaled(acc, 1.0 / gl.where(none, 1.0, total)), 0, place, step, alive)


@gluon.jit
def second_group(
    query, cached, cached_rope, weights, best, sums, full, free, ready, met,
    nope, nope_head, pe, pe_head, o, lse, place, step, alive, factor, begin, pairs, length,
):  # fmt: skip
    """The right half of the columns, and the weights of each pair's second block."""
    rope, highest, total, acc = started(pe, pe_head, alive)
    share_query(nope + 256, nope_head, alive, query.index(1), met.index(0))
    ROWS: gl.constexpr = total.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for pair in range(pairs):
        phase = pair & 1
        inside = length - (begin + 2 * pair + 1) * 64
        key = cached_rope.index(1)
        logits = logits_of(rope, query, cached, key, full, phase, inside, factor, 1)
        higher = gl.max(logits, 1)
        hopper.mbarrier.wait(ready.index(0), phase)
        higher = gl.maximum(best.index(0).load(ROWS), higher)
        base = base_of(higher)
        weight = gl.exp2(logits - base[:, None])
        best.index(1).store(higher)
        hand_over(weight, weights.index(1), ready.index(1))
        decay = gl.exp2(highest - base)
        highest = higher
        total = total * decay + gl.sum(weight, 1)
        own = gl.convert_layout(weight.to(cached.dtype), WEIGHTS)
        acc = multiply(own, cached.index(2), scaled(acc, decay))
        hopper.mbarrier.wait(ready.index(2), phase)
        acc = summed(acc, free.index(2))
        acc = summed(multiply(weights.index(0), cached.index(1), acc), free.index(1))
    total = whole(total, sums, met, 1)
    store_half(o, scaled(acc, 1.0 / gl.where(total == 0.0, 1.0, total)), 256, place, step, alive)


@gluon.jit
def whole(total, sums, met, WHICH: gl.constexpr):
    """Both groups' sums of weights, in one order."""
    sums.index(WHICH).store(total)
    meet(met.index(1))
    return sums.index(0).load(total.type.layout) + sums.index(1).load(total.type.layout)


@gluon.jit
def store_half(o, result, first, place, step, alive):
    """Write columns of the heads' results, from number `first` on."""
    LAYOUT: gl.constexpr = result.type.layout
    HEADS: gl.constexpr = result.shape[0]
    HALF: gl.constexpr = result.shape[1]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    at = o + ((place + head * step) * (2 * HALF) + first)[:, None] + column[None, :]
    gl.store(at, result.to(o.dtype.element_ty), mask=(head < alive)[:, None])


@gluon.jit
def latent_groups_kernel(
    q_nope, q_pe, values, keys, seq_lens, page_table, o, lse, scale,
    nope_row, nope_head, pe_row, pe_head, page_lines, table_stride,
    HEADS: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """As `latent_split_kernel`, for slots of 512 + 64 numbers of 16 bits and pages of whole blocks.

    The programs of the same slots have neighbouring numbers: they run at the same time, and one
    reads from the cache what the other one has read from memory.

    Args:
        values, keys: the cache's parts as tables, in blocks [64, 256] and [64, 64].
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    head = gl.program_id(0) * 64
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    row = gl.program_id(2).to(gl.int64)
    length = gl.load(seq_lens + row).to(gl.int32)
    blocks = gl.cdiv(length, 64)
    each = gl.cdiv(gl.cdiv(blocks, 2), splits) * 2
    begin = gl.minimum(split * each, blocks)
    pairs = gl.cdiv(gl.minimum(each, blocks - begin), 2)
    alive = HEADS - head

    dtype: gl.constexpr = q_nope.dtype.element_ty
    query = gl.allocate_shared_memory(dtype, [2, 64, 256], TILE)
    cached = gl.allocate_shared_memory(dtype, [4, 64, 256], TILE)
    cached_rope = gl.allocate_shared_memory(dtype, [2, 64, 64], TILE)
    weights = gl.allocate_shared_memory(dtype, [2, 64, 64], TILE)
    best = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], SIGNAL)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], SIGNAL)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], SIGNAL)
    met = gl.allocate_shared_memory(gl.int64, [2, 1], SIGNAL)
    for half in gl.static_range(4):
        hopper.mbarrier.init(full.index(half), 1)
        hopper.mbarrier.init(free.index(half), 1)
    for signal in gl.static_range(3):
        hopper.mbarrier.init(ready.index(signal), 1)
    for signal in gl.static_range(2):
        hopper.mbarrier.init(met.index(signal), 2)
    hopper.fence_async_shared()

    place = (row * HEADS + head) * splits + split
    nope = q_nope + row * nope_row + head * nope_head
    pe = q_pe + row * pe_row + head * pe_head
    shared = (query, cached, cached_rope, weights, best, sums, full, free, ready, met)
    task = (nope, nope_head, pe, pe_head, o, lse, place, splits, alive)
    slots = (scale * 1.4426950408889634, begin, pairs, length)
    table = page_table + row * table_stride
    source = (values, keys, cached, cached_rope, full, free)
    where = (table, page_lines, begin, pairs, blocks - 1, SIZE)
    gl.warp_specialize(
        [
            (first_group, shared + task + slots),
            (second_group, shared + task + slots),
            (copy_blocks, source + where),
        ],
        [4, 1],
        [232, 24],
    )
