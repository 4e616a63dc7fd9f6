"""Attention over windows for Hopper: two groups of warps with 64 lines each, a warp that copies
keys and values, and one that clears what nobody may see of these.

Lines are those of `tile_kernel`. A window ends after a few blocks of keys: so a program takes one
tile after the other, and the next one's keys are copied while the last one is stored. A group asks
for the products with the next keys before it adds the values of the last ones: see
`cairn.ops.flash_attn.wgmma`.
"""

from __future__ import annotations

from cairn.ops.attention import kernels
from cairn.ops.flash_attn.wgmma import copy_columns, products
from cairn.ops.gpu import constant, gl, gluon, hopper
from cairn.ops.wgmma import base_of, for_rows, multiply, scaled, summed, tell

first_visible = gluon.also(kernels.first_visible)
NOBODY = constant(2147483647)
"""Behind the last row."""


@gluon.jit
def tile_of(tile, tokens, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """The KV head of a tile and its first token: late ones see the most keys, and come first."""
    return tile % KV_HEADS, (gl.cdiv(tokens, TOKENS) - 1 - tile // KV_HEADS) * TOKENS


@gluon.jit
def rows_of(row, slot, begin, tokens, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Rows and slots [TOKENS] of a tile's tokens, which each warp has; NOBODY behind the last."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    token = begin + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, EACH))
    alive = token < tokens
    own_row = gl.load(row + token, mask=alive, other=NOBODY).to(gl.int32)
    return own_row, gl.load(slot + token, mask=alive, other=-1).to(gl.int32)


@gluon.jit
def row_behind(own_row, last):
    """The least of a tile's rows above `last`, or NOBODY."""
    return gl.min(gl.where(own_row > last, own_row, NOBODY), 0)


@gluon.jit
def span_of(own_row, own_slot, this_row, window, SIZE: gl.constexpr, ALIGNED: gl.constexpr):
    """Of a tile's tokens of one row: the first and the last block of 64 slots that their windows
    lie in, and the last slot.

    Padding, at slot -1, sees nothing; there is a block all the same.
    """
    mine = own_row == this_row
    first = first_visible(own_slot, window, SIZE, ALIGNED)
    high = gl.max(gl.where(mine, own_slot, -1), 0)
    low = gl.min(gl.where(mine & (own_slot >= 0), first, gl.maximum(high, 0)), 0)
    return low // 64, gl.maximum(high, 0) // 64, high


@gluon.jit
def seen_by_all(own_row, own_slot, this_row, window, SIZE: gl.constexpr, ALIGNED: gl.constexpr):
    """Between which slots of a row all of a tile's tokens see all; -1 the last, if some are of
    other rows."""
    mine = own_row == this_row
    first = first_visible(own_slot, window, SIZE, ALIGNED)
    whole = gl.max(gl.where(mine, first, 0), 0)
    until = gl.min(gl.where(mine, own_slot, NOBODY), 0)
    others = gl.max(((own_row != this_row) & (own_row != NOBODY)).to(gl.int32), 0)
    return whole, gl.where(others > 0, -1, until)


@gluon.jit
def copy_pairs(
    keys, values, shared, table, where, step, first, last, SIZE: gl.constexpr
):  # fmt: skip
    """Copy blocks first .. last of a row, two at a time, as stages become free; the last one twice
    if it has no other. How many pairs the program has copied then, of which there were `step`.

    Args:
        where: the line of the head's slot 0 in page 0, and from page to page; of keys, of values.
    """
    _, cached_keys, cached_values, full, _, free = shared
    k_line, k_page, v_line, v_page = where
    STAGES: gl.constexpr = cached_keys.shape[0]
    BYTES: gl.constexpr = 128 * cached_keys.shape[2] * 2
    IN_PAGE: gl.constexpr = SIZE // 64
    for block in range(first, last + 1, 2):
        stage = step % STAGES
        used = (step // STAGES & 1) ^ 1
        other = gl.minimum(block + 1, last)
        page = gl.load(table + block // IN_PAGE)
        next_page = gl.load(table + other // IN_PAGE)
        inner = block % IN_PAGE * 64
        next_inner = other % IN_PAGE * 64
        arrived = full.index(2 * stage)
        tile = cached_keys.index(stage)
        hopper.mbarrier.wait(free.index(2 * stage), used)
        hopper.mbarrier.expect(arrived, BYTES)
        copy_columns(keys, k_line + page * k_page + inner, 0, arrived, tile, 0)
        copy_columns(keys, k_line + next_page * k_page + next_inner, 0, arrived, tile, 64)
        arrived = full.index(2 * stage + 1)
        tile = cached_values.index(stage)
        hopper.mbarrier.wait(free.index(2 * stage + 1), used)
        hopper.mbarrier.expect(arrived, BYTES)
        copy_columns(values, v_line + page * v_page + inner, 0, arrived, tile, 0)
        copy_columns(values, v_line + next_page * v_page + next_inner, 0, arrived, tile, 64)
        step += 1
    return step


@gluon.jit
def place_of(kv, k_page, k_head, v_page, v_head):
    """`where` of `copy_pairs`."""
    return kv * k_head, k_page, kv * v_head, v_page


@gluon.jit
def copy_tiles(
    keys, values, shared, tokens_of, table, lines, window,
    SPAN: gl.constexpr, KV_HEADS: gl.constexpr, SIZE: gl.constexpr, TOKENS: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """Copy what a program's tiles see, in their order: blocks as SPAN says, which is `span_of` or
    gives the same."""
    row, slot, tokens = tokens_of
    page_table, table_stride = table
    k_page, k_head, v_page, v_head = lines
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(tokens, TOKENS) * KV_HEADS, gl.num_programs(0)):
        kv, begin = tile_of(tile, tokens, KV_HEADS, TOKENS)
        own_row, own_slot = rows_of(row, slot, begin, tokens, TOKENS, 1)
        where = place_of(kv, k_page, k_head, v_page, v_head)
        this_row = row_behind(own_row, -1)
        while this_row < NOBODY:
            start, end, _ = SPAN(own_row, own_slot, this_row, window, SIZE, ALIGNED)
            pages = page_table + this_row.to(gl.int64) * table_stride
            step = copy_pairs(keys, values, shared, pages, where, step, start, end, SIZE)
            this_row = row_behind(own_row, this_row)


@gluon.jit
def clear_tiles(
    shared, tokens_of, window,
    SPAN: gl.constexpr, KV_HEADS: gl.constexpr, SIZE: gl.constexpr, TOKENS: gl.constexpr,
    ALIGNED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Clear what nobody may see of what `copy_tiles` copies."""
    row, slot, tokens = tokens_of
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(tokens, TOKENS) * KV_HEADS, gl.num_programs(0)):
        _, begin = tile_of(tile, tokens, KV_HEADS, TOKENS)
        own_row, own_slot = rows_of(row, slot, begin, tokens, TOKENS, 1)
        this_row = row_behind(own_row, -1)
        while this_row < NOBODY:
            start, end, high = SPAN(own_row, own_slot, this_row, window, SIZE, ALIGNED)
            step = clear_pairs(shared, step, start, end, high, SIZE, MASKED)
            this_row = row_behind(own_row, this_row)


@gluon.jit
def lines_of(
    begin, tokens, kv, WHICH: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    HP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(token, place among [T, HEADS], whether it is anybody's) of a group's lines [64]."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    line = WHICH * 64 + gl.arange(0, 64, layout=LAYOUT)
    token = begin + line // HP
    alive = (token < tokens) & (line % HP < GROUP)
    return token, token.to(gl.int64) * HEADS + kv * GROUP + line % HP, alive


@gluon.jit
def load_queries(
    tile, q, begin, tokens, kv, WHICH: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    HP: gl.constexpr,
):  # fmt: skip
    """Fill a tile with a group's queries."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    DIM: gl.constexpr = tile.shape[1]
    _, place, alive = lines_of(
        begin, tokens, kv, WHICH, HEADS, KV_HEADS, HP, gl.SliceLayout(1, LINES)
    )
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES))
    at = q + (place * DIM)[:, None] + column[None, :]
    tile.store(gl.load(at, mask=alive[:, None], other=0.0))
    hopper.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def clear_lines(tile, inside, one, two):
    """Zeros in lines of a tile [128, DIM], by one warp: from number `inside` on, and in the last of
    either half. A weight of 0 times what is there may be NaN."""
    PARTS: gl.constexpr = tile.shape[1] // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    eight = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for first in gl.static_range(0, 128, 8):
        if (inside < first + 8) | (one & (first == 56)) | (two & (first == 120)):
            line = first + eight
            kept = (line < inside) & ((line != 63) | (not one)) & ((line != 127) | (not two))
            for part in gl.static_range(PARTS):
                lines = tile.slice(first, 8, dim=0).slice(part * 64, 64, dim=1)
                lines.store(gl.where(kept[:, None], lines.load(LAYOUT), 0.0))


@gluon.jit
def clear_pairs(
    shared, step, first, last, high, SIZE: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Clear what nobody may see of values of blocks first .. last, see `copy_pairs`, when they are
    there: behind slot `high`, and landmarks, with MASKED. Say then that they are ready.

    A warp of its own does: to those that multiply it would be a step more for each pair.
    """
    _, cached_keys, cached_values, full, ready, _ = shared
    STAGES: gl.constexpr = cached_keys.shape[0]
    IN_PAGE: gl.constexpr = SIZE // 64
    for block in range(first, last + 1, 2):
        stage = step % STAGES
        hopper.mbarrier.wait(full.index(2 * stage + 1), step // STAGES & 1)
        one = MASKED & (block % IN_PAGE == IN_PAGE - 1)
        two = MASKED & ((block + 1) % IN_PAGE == IN_PAGE - 1)
        clear_lines(cached_values.index(stage), high + 1 - block * 64, one, two)
        hopper.fence_async_shared()
        tell(ready.index(stage))
        step += 1
    return step


@gluon.jit
def weights_of(
    logits, best, first, last, start, whole, until, factor,
    SIZE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(weights, their rows' maximum, what older sums are worth) of 128 keys from `start` on.

    Args:
        first, last: [64] what each line sees; whole, until: what all of them see.
    """
    LOGITS: gl.constexpr = logits.type.layout
    key = gl.arange(0, 128, layout=gl.SliceLayout(0, LOGITS))
    if MASKED:
        if SIZE == 64:
            landmark = key % 64 == 63
        else:
            landmark = (start + key) % SIZE == SIZE - 1
        logits = gl.where(landmark[None, :], float("-inf"), logits)
    if (start < whole) | (start + 127 > until):
        seen = (start + key)[None, :] <= last[:, None]
        seen = seen & ((start + key)[None, :] >= first[:, None])
        logits = gl.where(seen, logits, float("-inf"))
    higher = gl.maximum(best, gl.max(logits, 1))
    base = base_of(higher) * factor
    return gl.exp2(logits * factor - base[:, None]), higher, gl.exp2(best * factor - base)


@gluon.jit
def attend_window(
    own_queries, shared, step, start, end, first, last, whole, until, factor,
    SIZE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Of a group's lines (sums of values, of weights, the weights' maximum) over blocks start ..
    end, the first pair of which is the program's `step`-th; and how many pairs there were then.

    Args:
        first, last: [64] the slots that each line sees.
        whole, until: of `seen_by_all`.
    """
    _, cached_keys, cached_values, full, ready, free = shared
    STAGES: gl.constexpr = cached_keys.shape[0]
    DIM: gl.constexpr = cached_keys.shape[2]
    LOGITS: gl.constexpr = first.type.layout.parent
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    acc = gl.zeros([64, DIM], gl.float32, layout=SUMS)
    none = gl.zeros([64, 128], gl.float32, layout=LOGITS)
    best = gl.full([64], float("-inf"), gl.float32, layout=first.type.layout)
    stage = step % STAGES
    hopper.mbarrier.wait(full.index(2 * stage), step // STAGES & 1)
    logits = products(own_queries, cached_keys.index(stage), none)
    logits = hopper.warpgroup_mma_wait(0, deps=[logits])
    tell(free.index(2 * stage))
    weights, best, _ = weights_of(
        logits, best, first, last, start * 64, whole, until, factor, SIZE, MASKED
    )
    total = gl.sum(weights, 1)
    own = gl.convert_layout(weights.to(cached_keys.dtype), WEIGHTS)
    for block in range(start + 2, end + 1, 2):
        before = step % STAGES
        phase = step // STAGES & 1
        step += 1
        stage = step % STAGES
        hopper.mbarrier.wait(full.index(2 * stage), step // STAGES & 1)
        logits = products(own_queries, cached_keys.index(stage), none)
        hopper.mbarrier.wait(ready.index(before), phase)
        acc = multiply(own, cached_values.index(before), acc)
        logits = hopper.warpgroup_mma_wait(1, deps=[logits])
        tell(free.index(2 * stage))
        weights, best, decay = weights_of(
            logits, best, first, last, block * 64, whole, until, factor, SIZE, MASKED
        )
        total = total * decay + gl.sum(weights, 1)
        acc = scaled(summed(acc, free.index(2 * before + 1)), decay)
        own = gl.convert_layout(weights.to(cached_keys.dtype), WEIGHTS)
    stage = step % STAGES
    hopper.mbarrier.wait(ready.index(stage), step // STAGES & 1)
    acc = summed(multiply(own, cached_values.index(stage), acc), free.index(2 * stage + 1))
    return acc, total, best, step + 1


@gluon.jit
def store_lines(at, value, shown):
    """Write [64, DIM] numbers to the lines that begin at the addresses `at` [64]."""
    DIM: gl.constexpr = value.shape[1]
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, value.type.layout))
    at = for_rows(at, value)[:, None] + column[None, :]
    value = value.to(at.dtype.element_ty)
    gl.store(at, value, mask=for_rows(shown, value)[:, None])


@gluon.jit
def attend_windows(
    shared, given, tokens_of, task,
    WHICH: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, SIZE: gl.constexpr,
    TOKENS: gl.constexpr, HP: gl.constexpr, ALIGNED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The lines of group WHICH of a program's tiles."""
    q, o, lse = given
    row, slot, tokens = tokens_of
    window, factor = task
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    own_queries = shared[0].index(WHICH)
    DIM: gl.constexpr = own_queries.shape[1]
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(tokens, TOKENS) * KV_HEADS, gl.num_programs(0)):
        kv, begin = tile_of(tile, tokens, KV_HEADS, TOKENS)
        load_queries(own_queries, q, begin, tokens, kv, WHICH, HEADS, KV_HEADS, HP)
        tile_row, tile_slot = rows_of(row, slot, begin, tokens, TOKENS, 4)
        token, place, alive = lines_of(begin, tokens, kv, WHICH, HEADS, KV_HEADS, HP, ROWS)
        own_row = gl.load(row + token, mask=alive, other=-1).to(gl.int32)
        own_slot = gl.load(slot + token, mask=alive, other=-1).to(gl.int32)
        first = first_visible(own_slot, window, SIZE, ALIGNED)
        this_row = row_behind(tile_row, -1)
        while this_row < NOBODY:
            start, end, _ = span_of(tile_row, tile_slot, this_row, window, SIZE, ALIGNED)
            whole, until = seen_by_all(tile_row, tile_slot, this_row, window, SIZE, ALIGNED)
            mine = own_row == this_row
            last = gl.where(mine, own_slot, -1)
            acc, total, best, step = attend_window(
                own_queries, shared, step, start, end, first, last, whole, until, factor,
                SIZE, MASKED,
            )  # fmt: skip
            # NaN is seen too.
            seen = total != 0.0
            some = gl.where(seen, total, 1.0)
            logs = (best * factor + gl.log2(some)) * 0.6931471805599453
            gl.store(lse + place, gl.where(seen, logs, float("-inf")), mask=mine)
            store_lines(o + place * DIM, scaled(acc, 1.0 / some), mine)
            this_row = row_behind(tile_row, this_row)


@gluon.jit
def stages(dtype: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """Place for queries, keys and values, and signals: that keys or values are there, that values
    are ready to be multiplied, that both groups are done with keys or values."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2, 64, DIM], TILE)
    cached_keys = gl.allocate_shared_memory(dtype, [STAGES, 128, DIM], TILE)
    cached_values = gl.allocate_shared_memory(dtype, [STAGES, 128, DIM], TILE)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], SIGNAL)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], SIGNAL)
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], SIGNAL)
    for tile in gl.static_range(2 * STAGES):
        hopper.mbarrier.init(full.index(tile), 1)
        hopper.mbarrier.init(free.index(tile), 2)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(stage), 1)
    hopper.fence_async_shared()
    return queries, cached_keys, cached_values, full, ready, free


@gluon.jit(do_not_specialize=["tokens", "window"])
def window_groups_kernel(
    q, keys, values, row, slot, page_table, o, lse, tokens, window, scale,
    table_stride, k_page, k_head, v_page, v_head,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, SIZE: gl.constexpr,
    TOKENS: gl.constexpr, HP: gl.constexpr, STAGES: gl.constexpr,
    ALIGNED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """As `tile_kernel`, with a window, for programs that take one tile after the other.

    Args:
        keys, values: tables of lines in blocks [64, 64]; k_, v_: where pages and heads lie in them.
        SIZE: slots of a page, whole blocks.
        HP: heads of a group, padded: TOKENS * HP = 128.
    """
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    SPAN: gl.constexpr = span_of
    shared = stages(q.dtype.element_ty, DIM, STAGES)
    tokens_of = (row, slot, tokens)
    given = (q, o, lse)
    task = (window, scale * 1.4426950408889634)
    table = (page_table, table_stride)
    lines = (k_page, k_head, v_page, v_head)
    gl.warp_specialize(
        [
            (attend_windows, (
                shared, given, tokens_of, task,
                FIRST, HEADS, KV_HEADS, SIZE, TOKENS, HP, ALIGNED, MASKED,
            )),
            (attend_windows, (
                shared, given, tokens_of, task,
                SECOND, HEADS, KV_HEADS, SIZE, TOKENS, HP, ALIGNED, MASKED,
            )),
            (copy_tiles, (
                keys, values, shared, tokens_of, table, lines, window,
                SPAN, KV_HEADS, SIZE, TOKENS, ALIGNED,
            )),
            (clear_tiles, (
                shared, tokens_of, window, SPAN, KV_HEADS, SIZE, TOKENS, ALIGNED, MASKED,
            )),
        ],
        [4, 1, 1],
        [232, 32, 32],
    )  # fmt: skip
