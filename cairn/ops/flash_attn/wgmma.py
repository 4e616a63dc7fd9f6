"""Flash attention for Hopper: two warp groups with 64 rows each, and a warp that copies keys.

A group issues the products with the next keys before it adds the values of the last ones, so that
exponentials and products overlap (FlashAttention-3, Shah et al., 2024, 3.2). Rows are those of
`flash_kernel`; splits, windows to the left, scales and caps are not supported.
"""

from __future__ import annotations

from cairn.ops.flash_attn import kernels
from cairn.ops.gpu import gl, gluon, hopper
from cairn.ops.wgmma import (
    arrive,
    base_of,
    clear,
    copy,
    for_rows,
    multiply,
    scaled,
    summed,
)

queries_of, keys_of = gluon.also(kernels.queries_of), gluon.also(kernels.keys_of)


@gluon.jit
def copy_keys(
    keys, values, shared, place, blocks, last, SIZE: gl.constexpr, PAGED: gl.constexpr
):  # fmt: skip
    """Copy blocks of keys and values 0 .. blocks - 1, each when its stage is free.

    Args:
        last: the last key, whose page stands for those behind it.
    """
    _, cached_keys, cached_values, full, free = shared
    table, k_line, k_page, k_column, v_line, v_page, v_column = place
    STAGES: gl.constexpr = cached_keys.shape[0]
    KEYS: gl.constexpr = cached_keys.shape[1]
    BYTES: gl.constexpr = 2 * KEYS * cached_keys.shape[2]
    for block in range(blocks):
        stage = block % STAGES
        used = (block // STAGES & 1) ^ 1
        start = block * KEYS
        middle = start + 64
        k_first, k_second = k_line + start, k_line + middle
        v_first, v_second = v_line + start, v_line + middle
        if PAGED:
            middle = gl.minimum(middle, last // 64 * 64)
            page = gl.load(table + start // SIZE)
            next_page = gl.load(table + middle // SIZE)
            k_first = k_line + page * k_page + start % SIZE
            v_first = v_line + page * v_page + start % SIZE
            k_second = k_line + next_page * k_page + middle % SIZE
            v_second = v_line + next_page * v_page + middle % SIZE
        arrived = full.index(2 * stage)
        hopper.mbarrier.wait(free.index(2 * stage), used)
        hopper.mbarrier.expect(arrived, BYTES)
        copy_columns(keys, k_first, k_column, arrived, cached_keys.index(stage), 0)
        if KEYS > 64:
            copy_columns(keys, k_second, k_column, arrived, cached_keys.index(stage), 64)
        arrived = full.index(2 * stage + 1)
        hopper.mbarrier.wait(free.index(2 * stage + 1), used)
        hopper.mbarrier.expect(arrived, BYTES)
        copy_columns(values, v_first, v_column, arrived, cached_values.index(stage), 0)
        if KEYS > 64:
            copy_columns(values, v_second, v_column, arrived, cached_values.index(stage), 64)


@gluon.jit
def copy_columns(lines, line, column, arrived, tile, FIRST: gl.constexpr):
    """Fill 64 lines of a tile, from number FIRST on."""
    PARTS: gl.constexpr = tile.shape[1] // 64
    for part in gl.static_range(PARTS):
        columns = tile.slice(FIRST, 64, dim=0).slice(part * 64, 64, dim=1)
        copy(lines, [line, column + part * 64], arrived, columns)


@gluon.jit
def weights_of(logits, best, last, low, factor, start):
    """(weights, their rows' maximum, what older sums are worth) of the keys from `start` on.

    Args:
        last: [lines] the last key that a line sees: key `low` at least.
    """
    LOGITS: gl.constexpr = logits.type.layout
    KEYS: gl.constexpr = logits.shape[1]
    if start + KEYS - 1 > low:
        key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LOGITS))
        logits = gl.where(key[None, :] <= last[:, None], logits, float("-inf"))
    higher = gl.maximum(best, gl.max(logits, 1))
    base = base_of(higher) * factor
    return gl.exp2(logits * factor - base[:, None]), higher, gl.exp2(best * factor - base)


@gluon.jit
def lines_of(
    first, count, used, length, right, part,
    WHICH: gl.constexpr, GROUP: gl.constexpr, HP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(query, member of the group of heads, whether it is there, last key) of a group's lines."""
    line = WHICH * 64 + gl.arange(0, 64, layout=LAYOUT)
    query = first + line // HP
    member = part * HP + line % HP
    last = gl.where(right >= 0, gl.minimum(query + length - used + right, length - 1), length - 1)
    return query, member, (query < count) & (member < GROUP), gl.where(query < used, last, -1)


@gluon.jit
def attend(
    shared, asked, given, logged, task,
    WHICH: gl.constexpr, GROUP: gl.constexpr, HP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The lines of group WHICH."""
    queries, cached_keys, cached_values, full, free = shared
    q, q_token, q_head = asked
    first, count, used, length, right, part, factor, blocks = task
    STAGES: gl.constexpr = cached_keys.shape[0]
    KEYS: gl.constexpr = cached_keys.shape[1]
    DIM: gl.constexpr = cached_keys.shape[2]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    LINE: gl.constexpr = gl.SliceLayout(1, LINES)
    query, member, alive, _ = lines_of(
        first, count, used, length, right, part, WHICH, GROUP, HP, LINE
    )
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES))
    place = query.to(gl.int64) * q_token + member.to(gl.int64) * q_head
    at = q + place[:, None] + column[None, :]
    own_queries = queries.index(WHICH)
    own_queries.store(gl.load(at, mask=alive[:, None], other=0.0))
    hopper.fence_async_shared()
    gl.thread_barrier()

    query, member, alive, last = lines_of(
        first, count, used, length, right, part, WHICH, GROUP, HP, ROWS
    )
    low = length - 1
    if right >= 0:
        low = gl.minimum(first + WHICH * 64 // HP + length - used + right, low)
    best = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
    acc = gl.zeros([64, DIM], gl.float32, layout=SUMS)
    none = gl.zeros([64, KEYS], gl.float32, layout=LOGITS)
    hopper.mbarrier.wait(full.index(0), 0)
    logits = products(own_queries, cached_keys.index(0), none)
    logits = hopper.warpgroup_mma_wait(0, deps=[logits])
    arrive(free.index(0))
    weights, best, _ = weights_of(logits, best, last, low, factor, 0)
    total = gl.sum(weights, 1)
    own = gl.convert_layout(weights.to(cached_keys.dtype), WEIGHTS)
    for block in range(1, blocks):
        stage = block % STAGES
        before = (block - 1) % STAGES
        hopper.mbarrier.wait(full.index(2 * stage), block // STAGES & 1)
        logits = products(own_queries, cached_keys.index(stage), none)
        hopper.mbarrier.wait(full.index(2 * before + 1), (block - 1) // STAGES & 1)
        acc = multiply(own, cached_values.index(before), acc)
        logits = hopper.warpgroup_mma_wait(1, deps=[logits])
        arrive(free.index(2 * stage))
        weights, best, decay = weights_of(logits, best, last, low, factor, block * KEYS)
        total = total * decay + gl.sum(weights, 1)
        acc = scaled(summed(acc, free.index(2 * before + 1)), decay)
        own = gl.convert_layout(weights.to(cached_keys.dtype), WEIGHTS)
    stage = (blocks - 1) % STAGES
    value = cached_values.index(stage)
    hopper.mbarrier.wait(full.index(2 * stage + 1), (blocks - 1) // STAGES & 1)
    if blocks * KEYS > length:
        # Both warp groups write the same zeros.
        clear(value, length - (blocks - 1) * KEYS)
        hopper.fence_async_shared()
        gl.thread_barrier()
    acc = summed(multiply(own, value, acc), free.index(2 * stage + 1))

    numbers = (first, count, used, length, right, part)
    store_lines(acc, total, best, given, logged, numbers, factor, WHICH, GROUP, HP, SINKS)


@gluon.jit
def store_lines(
    acc, total, best, given, logged, numbers, factor,
    WHICH: gl.constexpr, GROUP: gl.constexpr, HP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Store the results of a group's lines."""
    o, o_token, o_head = given
    lse, lse_token, lse_head, sinks = logged
    first, count, used, length, right, part = numbers
    ROWS: gl.constexpr = total.type.layout
    SUMS: gl.constexpr = acc.type.layout
    LINES: gl.constexpr = gl.SliceLayout(1, SUMS)
    DIM: gl.constexpr = acc.shape[1]
    query, member, alive, last = lines_of(
        first, count, used, length, right, part, WHICH, GROUP, HP, ROWS
    )
    seen = (total != 0.0) & (last >= 0)
    some = gl.where(seen, total, 1.0)
    logs = (best * factor + gl.log2(some)) * 0.6931471805599453
    at = lse + query.to(gl.int64) * lse_token + member * lse_head
    gl.store(at, gl.where(seen, logs, float("inf")), mask=alive)
    if SINKS:
        sink = gl.load(sinks + member, mask=alive, other=0.0).to(gl.float32)
        some += gl.exp2(sink * 1.4426950408889634 - gl.where(seen, best * factor, 0.0))
    result = gl.where(for_rows(seen, acc)[:, None], scaled(acc, 1.0 / some), 0.0)
    query, member, alive, _ = lines_of(
        first, count, used, length, right, part, WHICH, GROUP, HP, LINES
    )
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUMS))
    place = query.to(gl.int64) * o_token + member.to(gl.int64) * o_head
    at = o + place[:, None] + column[None, :]
    gl.store(at, result.to(o.dtype.element_ty), mask=alive[:, None])


@gluon.jit
def products(query, key, none):
    """Products of queries and keys, on their way."""
    return hopper.warpgroup_mma(query, key.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["right", "batch", "tiles", "even", "capacity"])
def flash_groups_kernel(
    q, o, lse, sinks, keys, values, page_table, batch_idx, cu_q, cu_k, used_q, used_k,
    scale, right, batch, tiles, even, capacity,
    q_batch, q_token, q_head, o_batch, o_token, o_head, lse_batch, lse_head, lse_token,
    table_stride, k_page, k_head, k_column, v_page, v_head, v_column,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, SIZE: gl.constexpr,
    TOKENS: gl.constexpr, HP: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    PAGED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """A tile of 128 lines of one sequence and KV head, or a block of its group.

    Args:
        keys, values: tables of lines in blocks [64, 64]; k_, v_: where heads lie in them.
        others: as in `flash_kernel`.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    GROUP: gl.constexpr = HEADS // KV_HEADS
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    PARTS: gl.constexpr = (GROUP + HP - 1) // HP
    row = (gl.program_id(0) % batch).to(gl.int64)
    # Tiles at the end of a sequence attend to the most keys, so they are launched first.
    first = (tiles - 1 - gl.program_id(0) // batch) * TOKENS
    kv = gl.program_id(1) // PARTS
    part = gl.program_id(1) % PARTS
    ahead, count, used, own = queries_of(row, even, cu_q, used_q)
    offset, length = keys_of(row, capacity, cu_k, used_k, None)
    seen = length
    if right >= 0:
        seen = gl.minimum(gl.minimum(first + TOKENS, used) + length - used + right, length)
    blocks = gl.maximum(gl.cdiv(seen, KEYS), 1)
    last = gl.maximum(length - 1, 0)
    k_line = kv * k_head + offset
    v_line = kv * v_head + offset
    # Placeholder pointer, never read: without pages there is no table.
    table = lse
    if PAGED:
        table = page_table + row * table_stride
    elif cu_k is None:
        lies = row
        if batch_idx is not None:
            lies = gl.load(batch_idx + row)
        k_line += lies.to(gl.int32) * k_page
        v_line += lies.to(gl.int32) * v_page

    dtype: gl.constexpr = q.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [2, 64, DIM], TILE)
    cached_keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    cached_values = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], SIGNAL)
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], SIGNAL)
    for tile in gl.static_range(2 * STAGES):
        hopper.mbarrier.init(full.index(tile), 1)
        hopper.mbarrier.init(free.index(tile), 2)
    hopper.fence_async_shared()

    head = (kv * GROUP).to(gl.int64)
    line = row * 0 + ahead
    asked = (q + own * q_batch + line * q_token + head * q_head, q_token, q_head)
    given = (o + own * o_batch + line * o_token + head * o_head, o_token, o_head)
    # Placeholder for `sinks` too, where there are none.
    logs = lse + own * lse_batch + line * lse_token + head * lse_head
    logged = (logs, lse_token, lse_head, lse)
    if SINKS:
        logged = (logs, lse_token, lse_head, sinks + head)
    shared = (queries, cached_keys, cached_values, full, free)
    task = (first, count, used, length, right, part, scale * 1.4426950408889634, blocks)
    place = (table, k_line, k_page, kv * k_column, v_line, v_page, kv * v_column)
    gl.warp_specialize(
        [
            (attend, (shared, asked, given, logged, task, FIRST, GROUP, HP, SINKS)),
            (attend, (shared, asked, given, logged, task, SECOND, GROUP, HP, SINKS)),
            (copy_keys, (keys, values, shared, place, blocks, last, SIZE, PAGED)),
        ],
        [4, 1],
        [232, 24],
    )
