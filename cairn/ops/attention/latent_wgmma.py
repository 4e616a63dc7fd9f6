"""MLA's decode attention for Hopper: two warp groups that alternate on the tensor cores.

The accumulators of 64 heads fill the registers of two warp groups, each of which holds half of the
value columns. Key blocks are processed in pairs: each group computes the softmax weights of one
block of the pair and passes them to the other, and both add both blocks to their columns, so that
one group multiplies while the other computes exponentials. Both add the first block first, which
frees its buffer for the next pair. A further warp copies blocks ahead.

The division of work is FlashMLA's (DeepSeek, "A Deep-Dive Into the New Flash MLA Kernel", 2025).
Rescaling the accumulators only after a large rise of the logits is FlashAttention-4's.
"""

from __future__ import annotations

from cairn.ops.gpu import constant, gl, gluon, hopper
from cairn.ops.wgmma import (
    arrive,
    base_of,
    clear,
    copy,
    multiply,
    opaque_zero,
    scaled,
    summed,
)

RISE = constant(8.0)
"""A row's weights are 2^(logit - reference), logits to base 2. The reference is raised to the row's
largest logit only when that exceeds it by more than this, so that accumulators seldom need scaling
and weights stay below 2^8."""


@gluon.jit
def fetch(cache, line, slot_stride, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """Prefetch a block's lines of BYTES each into L2."""
    WARP: gl.constexpr = gl.BlockedLayout([SLOTS // 32], [32], [1], [0])
    slot = line + gl.arange(0, SLOTS, layout=WARP)
    at = (cache + slot.to(gl.int64) * slot_stride).to(gl.int64)
    asm: gl.constexpr = "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    for part in gl.static_range((BYTES + 127) // 128):
        place = at + part * 128
        gl.inline_asm_elementwise(asm, "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_blocks(
    values, keys, cache, slot_stride, cached, cached_rope, full, free, table, page_lines, begin,
    pairs, last, SIZE: gl.constexpr,
):  # fmt: skip
    """Copy pairs of blocks from block `begin` on, half a block at a time, in the order in which
    buffers become free.

    While no buffer is free, blocks are prefetched into L2: of programs that read the same blocks,
    the first program prefetches the first block of a pair, the last one the second.

    Args:
        cached: [4, slots, 256]: of each block the half that its own group sums, then the other.
        last: the row's last block; it is copied in place of blocks after it.
    """
    SLOTS: gl.constexpr = cached.shape[1]
    HALF: gl.constexpr = cached.shape[2]
    ROPE: gl.constexpr = cached_rope.shape[2]
    BYTES: gl.constexpr = cached.dtype.primitive_bitwidth // 8
    for pair in range(pairs):
        block = begin + 2 * pair
        first = line_of(block, table, page_lines, SLOTS, SIZE)
        second = line_of(gl.minimum(block + 1, last), table, page_lines, SLOTS, SIZE)
        if pair > 0:
            if gl.program_id(0) == 0:
                fetch(cache, first, slot_stride, SLOTS, (2 * HALF + ROPE) * BYTES)
            if gl.program_id(0) == gl.num_programs(0) - 1:
                fetch(cache, second, slot_stride, SLOTS, (2 * HALF + ROPE) * BYTES)
        for which in gl.static_range(2):
            for half in gl.static_range(2):
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
    """The first line of a block in the tables, by the page table."""
    IN_PAGE: gl.constexpr = SIZE // SLOTS
    return gl.load(table + block // IN_PAGE) * page_lines + block % IN_PAGE * SLOTS


@gluon.jit
def query_of(
    source, head_stride, alive, HEADS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):
    """[HEADS, WIDTH] columns of a query's heads, 0 from head `alive` on."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = source + (head * head_stride)[:, None] + column[None, :]
    return gl.load(at, mask=(head < alive)[:, None], other=0.0)


@gluon.jit
def share_query(source, head_stride, alive, tile, sync):
    """Store columns of the query to shared memory and wait until the other group has done so."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = tile.shape[1]
    tile.store(query_of(source, head_stride, alive, 64, WIDTH, LINES))
    hopper.fence_async_shared()
    sync_groups(sync)


@gluon.jit
def sync_groups(sync):
    """Barrier of the two groups that also makes their shared-memory stores visible."""
    arrive(sync)
    hopper.mbarrier.wait(sync, 0)


@gluon.jit
def logits_of(
    rope, query, cached, cached_rope, full, phase, inside, factor, zero, WHICH: gl.constexpr
):
    """Wait for a block of the pair and compute its logits [heads, slots] in base 2.

    Args:
        rope: the query's last columns, in registers.
        inside: mask of the block's slots that the row has; others are masked.
        zero: an `opaque_zero`.
    """
    LOGITS: gl.constexpr = rope.type.layout.parent
    SLOTS: gl.constexpr = cached.shape[1]
    own = cached.index(2 * WHICH + zero)
    rest = cached.index(2 * WHICH + 1 + zero)
    key = cached_rope.index(WHICH + zero)
    hopper.mbarrier.wait(full.index(2 * WHICH), phase)
    if inside < SLOTS:
        hopper.mbarrier.wait(full.index(2 * WHICH + 1), phase)
        clear(own, inside)
        clear(rest, inside)
        hopper.fence_async_shared()
    logits = gl.zeros([64, SLOTS], gl.float32, layout=LOGITS)
    logits = multiply(query.index(WHICH + zero), own.permute((1, 0)), logits)
    hopper.mbarrier.wait(full.index(2 * WHICH + 1), phase)
    logits = multiply(query.index(1 - WHICH + zero), rest.permute((1, 0)), logits)
    # Added last, so that the many products before do not round a large contribution of these few
    # again.
    logits = multiply(rope, key.permute((1, 0)), logits)
    logits = hopper.warpgroup_mma_wait(0, deps=[logits]) * factor
    if inside < SLOTS:
        slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, LOGITS))
        logits = gl.where((slot < inside)[None, :], logits, float("-inf"))
    return logits


@gluon.jit
def risen(base, logits, rise: gl.constexpr):
    """(the reference of each row's weights from this block on; whether any row's has changed). A
    row's reference depends on that row alone; the flag only skips work.

    Args:
        rise: see RISE.
    """
    top = gl.max(logits, 1)
    higher = gl.where(top > base + rise, top, base)
    return higher, gl.max((higher != base).to(gl.int32), 0)


@gluon.jit
def rounded(weight, tile):
    """The weights in the tile's 16-bit dtype, for the product, and these rounded values as float32,
    for the sum: numerator and denominator then use the same weights."""
    # Convert two values per instruction: one by one, as the compiler does it, takes as long as the
    # exponentials.
    if tile.dtype == gl.bfloat16:
        asm: gl.constexpr = """
            cvt.rn.bf16x2.f32 $0, $4, $3;
            shl.b32 $1, $0, 16;
            and.b32 $2, $0, 0xffff0000;
        """
    else:
        asm: gl.constexpr = """{
            .reg .b16 low, high;
            cvt.rn.f16x2.f32 $0, $4, $3;
            mov.b32 {low, high}, $0;
            cvt.f32.f16 $1, low;
            cvt.f32.f16 $2, high;
        }"""
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,r,r", [weight], dtype=(tile.dtype, gl.float32), is_pure=True, pack=2
    )


@gluon.jit
def hand_over(exchange, weight, base, changed, WHICH: gl.constexpr):
    """Publish a block's weights, their references and whether these changed, for the other
    group."""
    weights, bases, changes, ready = exchange
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    bases.index(WHICH).store(base)
    changes.index(WHICH).store(gl.full([1], 0, gl.int32, layout=ONE) + changed)
    weights.index(WHICH).store(weight)
    hopper.fence_async_shared()
    arrive(ready.index(WHICH))


@gluon.jit
def taken_over(exchange, phase, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """The references and the flag that group WHICH published, once it has."""
    _, bases, changes, ready = exchange
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    hopper.mbarrier.wait(ready.index(WHICH), phase)
    return bases.index(WHICH).load(LAYOUT), gl.max(changes.index(WHICH).load(ONE), 0)


@gluon.jit
def raised(acc, total, base, higher, changed):
    """Rescale the accumulators from references `base` to `higher`, if `changed`."""
    if changed != 0:
        decay = gl.exp2(base - base_of(higher))
        total = total * decay
        acc = scaled(acc, decay)
    return acc, total


@gluon.jit
def started(pe, pe_head, alive):
    """(the query's rope columns; the references; the sums of weights; the accumulators), in
    registers."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    rope = query_of(pe, pe_head, alive, 64, 64, gl.DotOperandLayout(0, LOGITS, 2))
    base = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
    total = gl.zeros([64], gl.float32, layout=ROWS)
    return rope, base, total, gl.zeros([64, 256], gl.float32, layout=SUMS)


@gluon.jit
def first_group(
    query, cached, cached_rope, exchange, sums, full, free, sync,
    nope, nope_head, pe, pe_head, o, lse, place, step, alive, factor, begin, pairs, length,
):  # fmt: skip
    """Computes the left half of the columns, and the weights of each pair's first block."""
    rope, base, total, acc = started(pe, pe_head, alive)
    share_query(nope, nope_head, alive, query.index(0), sync.index(0))
    weights, _, _, _ = exchange
    ROWS: gl.constexpr = total.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for pair in range(pairs):
        phase = pair & 1
        zero = opaque_zero(pair)
        inside = length - (begin + 2 * pair) * 64
        logits = logits_of(rope, query, cached, cached_rope, full, phase, inside, factor, zero, 0)
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
    nope, nope_head, pe, pe_head, o, lse, place, step, alive, factor, begin, pairs, length,
):  # fmt: skip
    """Computes the right half of the columns, and the weights of each pair's second block."""
    rope, base, total, acc = started(pe, pe_head, alive)
    share_query(nope + 256, nope_head, alive, query.index(1), sync.index(0))
    weights, _, _, _ = exchange
    ROWS: gl.constexpr = total.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for pair in range(pairs):
        phase = pair & 1
        zero = opaque_zero(pair)
        inside = length - (begin + 2 * pair + 1) * 64
        logits = logits_of(rope, query, cached, cached_rope, full, phase, inside, factor, zero, 1)
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
def whole(total, sums, sync, WHICH: gl.constexpr):
    """The sum of both groups' sums of weights, added in the same order in both."""
    sums.index(WHICH).store(total)
    sync_groups(sync.index(1))
    return sums.index(0).load(total.type.layout) + sums.index(1).load(total.type.layout)


@gluon.jit
def store_half(o, result, first, place, step, alive):
    """Store the heads' results in the columns from `first` on."""
    LAYOUT: gl.constexpr = result.type.layout
    HEADS: gl.constexpr = result.shape[0]
    HALF: gl.constexpr = result.shape[1]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    at = o + ((place + head * step) * (2 * HALF) + first)[:, None] + column[None, :]
    gl.store(at, result.to(o.dtype.element_ty), mask=(head < alive)[:, None])


@gluon.jit
def latent_groups_kernel(
    q_nope, q_pe, cache, values, keys, seq_lens, page_table, o, lse, scale,
    nope_row, nope_head, pe_row, pe_head, slot_stride, page_lines, table_stride,
    HEADS: gl.constexpr, SIZE: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """`latent_split_kernel` for latents of 512 + 64 columns in 16 bits and pages that are multiples
    of a block.

    Programs that read the same slots are adjacent in launch order: they run at the same time, and
    the second reads from L2 what the first has loaded.

    Args:
        values, keys: the cache's parts as tables, in blocks [64, 256] and [64, 64].
        LINES: heads of a program: 64.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    head = gl.program_id(0) * LINES
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

    place = (row * HEADS + head) * splits + split
    nope = q_nope + row * nope_row + head * nope_head
    pe = q_pe + row * pe_row + head * pe_head
    exchange = (weights, bases, changes, ready)
    shared = (query, cached, cached_rope, exchange, sums, full, free, sync)
    task = (nope, nope_head, pe, pe_head, o, lse, place, splits, alive)
    slots = (scale * 1.4426950408889634, begin, pairs, length)
    table = page_table + row * table_stride
    source = (values, keys, cache, slot_stride, cached, cached_rope, full, free)
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
