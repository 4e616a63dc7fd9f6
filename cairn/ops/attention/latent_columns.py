"""MLA's decode attention for Hopper where heads are few: slots are the lines of its products.

The tensor cores multiply 64 lines at least. With a program's heads as lines most of them would be
empty; the 64 slots of a block are not. Logits are then [slots, heads] and what is summed up is
[columns, heads]: one group of four warps holds all of it, and is done with a block before memory
has delivered the next one.
"""

from __future__ import annotations

from cairn.ops.attention.latent_groups import line_of, query_of
from cairn.ops.gpu import gl, gluon, hopper
from cairn.ops.groups import base_of, clear, copy, multiply, tell


@gluon.jit
def copy_columns(
    values, keys, cached, cached_rope, full, free, table, page_lines, begin, count,
    SIZE: gl.constexpr,
):  # fmt: skip
    """Copy blocks from number `begin` on, each into the place of the one before the last."""
    SLOTS: gl.constexpr = cached.shape[1]
    HALF: gl.constexpr = cached.shape[2]
    ROPE: gl.constexpr = cached_rope.shape[2]
    BYTES: gl.constexpr = cached.dtype.primitive_bitwidth // 8
    for number in range(count):
        line = line_of(begin + number, table, page_lines, SLOTS, SIZE)
        place = number & 1
        arrived = full.index(place)
        hopper.mbarrier.wait(free.index(place), (number >> 1 & 1) ^ 1)
        hopper.mbarrier.expect(arrived, SLOTS * (2 * HALF + ROPE) * BYTES)
        copy(values, [line, 0], arrived, cached.index(2 * place))
        copy(values, [line, HALF], arrived, cached.index(2 * place + 1))
        copy(keys, [line, 0], arrived, cached_rope.index(place))


@gluon.jit
def sum_columns(
    query, query_rope, cached, cached_rope, weights, full, free,
    nope, nope_head, pe, pe_head, o, lse, place, step, alive, factor, begin, count, length,
):  # fmt: skip
    """The sums over all blocks, and what becomes of them."""
    HEADS: gl.constexpr = query.shape[1]
    SLOTS: gl.constexpr = cached.shape[1]
    HALF: gl.constexpr = cached.shape[2]
    dtype: gl.constexpr = cached.dtype
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    ROWS: gl.constexpr = gl.SliceLayout(0, SUMS)
    for half in gl.static_range(2):
        columns = query_of(nope + half * HALF, nope_head, alive, HEADS, HALF, LINES)
        query.index(half).store(columns)
    query_rope.store(query_of(pe, pe_head, alive, HEADS, query_rope.shape[1], LINES))
    hopper.fence_async_shared()
    gl.thread_barrier()
    base = gl.full([HEADS], float("-inf"), gl.float32, layout=ROWS)
    total = gl.zeros([HEADS], gl.float32, layout=ROWS)
    left = gl.zeros([HALF, HEADS], gl.float32, layout=SUMS)
    right = gl.zeros([HALF, HEADS], gl.float32, layout=SUMS)
    for number in range(count):
        here = number & 1
        inside = length - (begin + number) * SLOTS
        own, other = cached.index(2 * here), cached.index(2 * here + 1)
        hopper.mbarrier.wait(full.index(here), number >> 1 & 1)
        if inside < SLOTS:
            clear(own, inside)
            clear(other, inside)
            hopper.fence_async_shared()
            gl.thread_barrier()
        logits = gl.zeros([SLOTS, HEADS], gl.float32, layout=SUMS)
        logits = multiply(own, query.index(0).permute((1, 0)), logits)
        logits = multiply(other, query.index(1).permute((1, 0)), logits)
        # Last: a large logit that these few products make is not rounded again by the many others.
        logits = multiply(cached_rope.index(here), query_rope.permute((1, 0)), logits)
        logits = hopper.warpgroup_mma_wait(0, deps=[logits]) * factor
        if inside < SLOTS:
            slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, SUMS))
            logits = gl.where((slot < inside)[:, None], logits, float("-inf"))
        higher = gl.maximum(base, gl.max(logits, 0))
        weight = gl.exp2(logits - base_of(higher)[None, :])
        weights.store(weight.to(dtype))
        hopper.fence_async_shared()
        gl.thread_barrier()
        decay = gl.exp2(base - base_of(higher))
        left = multiply(own.permute((1, 0)), weights, left * decay[None, :])
        right = multiply(other.permute((1, 0)), weights, right * decay[None, :])
        total = total * decay + gl.sum(weight, 0)
        base = higher
        left, right = hopper.warpgroup_mma_wait(0, deps=[left, right])
        tell(free.index(here))
    none = total == 0.0
    safe = gl.where(none, 1.0, total)
    logs = (base + gl.log2(safe)) * 0.6931471805599453
    head = gl.arange(0, HEADS, layout=ROWS)
    gl.store(lse + place + head * step, gl.where(none, float("-inf"), logs), mask=head < alive)
    store_columns(o, left, safe, 0, place, step, alive)
    store_columns(o, right, safe, HALF, place, step, alive)


@gluon.jit
def store_columns(o, result, total, first, place, step, alive):
    """Write columns of the heads' results, from number `first` on."""
    LAYOUT: gl.constexpr = result.type.layout
    HALF: gl.constexpr = result.shape[0]
    HEADS: gl.constexpr = result.shape[1]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    at = o + ((place + head * step) * (2 * HALF) + first)[None, :] + column[:, None]
    value = (result / total[None, :]).to(o.dtype.element_ty)
    gl.store(at, value, mask=(head < alive)[None, :])


@gluon.jit
def latent_columns_kernel(
    q_nope, q_pe, cache, values, keys, seq_lens, page_table, o, lse, scale,
    nope_row, nope_head, pe_row, pe_head, slot_stride, page_lines, table_stride,
    HEADS: gl.constexpr, SIZE: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """As `latent_groups_kernel`, with COLUMNS heads a program, 16 or 32.

    Nothing is fetched: cache and slot_stride have no effect.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    head = gl.program_id(0) * COLUMNS
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    row = gl.program_id(2).to(gl.int64)
    length = gl.load(seq_lens + row).to(gl.int32)
    blocks = gl.cdiv(length, 64)
    each = gl.cdiv(blocks, splits)
    begin = gl.minimum(split * each, blocks)
    count = gl.minimum(each, blocks - begin)
    alive = HEADS - head

    dtype: gl.constexpr = q_nope.dtype.element_ty
    query = gl.allocate_shared_memory(dtype, [2, COLUMNS, 256], TILE)
    query_rope = gl.allocate_shared_memory(dtype, [COLUMNS, 64], TILE)
    cached = gl.allocate_shared_memory(dtype, [4, 64, 256], TILE)
    cached_rope = gl.allocate_shared_memory(dtype, [2, 64, 64], TILE)
    weights = gl.allocate_shared_memory(dtype, [64, COLUMNS], NARROW)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], SIGNAL)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], SIGNAL)
    for signal in gl.static_range(2):
        hopper.mbarrier.init(full.index(signal), 1)
        hopper.mbarrier.init(free.index(signal), 1)
    hopper.fence_async_shared()

    place = (row * HEADS + head) * splits + split
    nope = q_nope + row * nope_row + head * nope_head
    pe = q_pe + row * pe_row + head * pe_head
    shared = (query, query_rope, cached, cached_rope, weights, full, free)
    task = (nope, nope_head, pe, pe_head, o, lse, place, splits, alive)
    slots = (scale * 1.4426950408889634, begin, count, length)
    source = (values, keys, cached, cached_rope, full, free)
    where = (page_table + row * table_stride, page_lines, begin, count, SIZE)
    gl.warp_specialize(
        [(sum_columns, shared + task + slots), (copy_columns, source + where)], [1], [24]
    )
