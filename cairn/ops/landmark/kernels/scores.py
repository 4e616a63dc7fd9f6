"""Page scores of many tokens for Hopper (see `select`), by warp groups that alternate on the tensor
cores.

A program holds the queries of 128 tokens. One warp group copies keys of pages, head by head; two
more handle half of the tokens each, and one multiplies while the other accumulates. A bias is added
by the product: three more columns of a key, multiplied with ones in the query. Adding it to each
element afterwards takes longer.
"""

from __future__ import annotations

from cairn.ops.gpu import gl, gluon, hopper
from cairn.ops.wgmma import arrive


@gluon.jit
def row_behind(row, slot, begin, tokens, offset, size, last):
    """The next row after `last` that has tokens in the tile, and the largest number of candidates
    of these tokens."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token = begin + gl.arange(0, 128, layout=FLAT)
    alive = token < tokens
    own_row = gl.load(row + token, mask=alive, other=-1).to(gl.int32)
    own_slot = gl.load(slot + token, mask=alive, other=0).to(gl.int32)
    this_row = gl.min(gl.where(own_row > last, own_row, 2147483647), 0)
    candidates = gl.maximum(own_slot - offset, 0) // size
    return this_row, gl.max(gl.where(own_row == this_row, candidates, 0), 0)


@gluon.jit
def pages_of(table, start, most, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Physical pages of candidates start .. start + BLOCK - 1 of a row; 0 from `most` on."""
    c = start + gl.arange(0, BLOCK, layout=LAYOUT)
    return gl.load(table + c, mask=c < most, other=0).to(gl.int64)


@gluon.jit
def columns_of(bias, COLUMNS: gl.constexpr):
    """[N, 16] bfloat16 whose first three columns sum up to bias [N] float32."""
    first = bias.to(gl.bfloat16)
    # The remainder of an infinite bias is 0, not inf - inf.
    rest = gl.where(gl.abs(first.to(gl.float32)) < float("inf"), bias - first.to(gl.float32), 0.0)
    second = rest.to(gl.bfloat16)
    third = (rest - second.to(gl.float32)).to(gl.bfloat16)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, COLUMNS))[None, :]
    parts = gl.where(column == 0, first[:, None], gl.zeros([1, 16], gl.bfloat16, layout=COLUMNS))
    parts = gl.where(column == 1, second[:, None], parts)
    return gl.where(column == 2, third[:, None], parts)


@gluon.jit
def biases_of(bias, page, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """[N, GROUP] biases of heads of pages [N]."""
    head = gl.arange(0, GROUP, layout=gl.SliceLayout(0, page.type.layout.parent))
    return gl.load(bias + (page * HEADS)[:, None] + head[None, :])


@gluon.jit
def copy_pages(
    shared, keys, strides, tile, where, scale,
    HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Copy keys of pages to shared memory as tiles become free, one head after the other."""
    _, ring, columns, full, free = shared
    key, bias, page_table = keys
    row, slot, begin, tokens, offset, size = tile
    table_stride, page_stride, head_stride = strides
    first, width, first_head = where
    STAGES: gl.constexpr = ring.shape[0]
    BLOCK: gl.constexpr = ring.shape[1]
    PARTS: gl.constexpr = ring.shape[2] // 8
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PARTS, PARTS], [4, 1], [1, 0])
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    BIASES: gl.constexpr = gl.BlockedLayout([1, GROUP], [32, 1], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.SliceLayout(1, LINES)
    FLAT: gl.constexpr = gl.SliceLayout(1, BIASES)
    column = gl.arange(0, ring.shape[2], layout=gl.SliceLayout(0, LINES))
    which = gl.arange(0, GROUP, layout=gl.SliceLayout(0, BIASES))
    inverse = 1.0 / scale
    step = 0
    this_row, most = row_behind(row, slot, begin, tokens, offset, size, -1)
    while this_row < 2147483647:
        table = page_table + this_row * table_stride
        page = pages_of(table, first, most, BLOCK, LINE)
        if BIAS:
            named = pages_of(table, first, most, BLOCK, FLAT)
            biases = biases_of(bias + first_head, named, HEADS, GROUP)
            named = pages_of(table, first + width, most, BLOCK, FLAT)
        for start in range(first, most, width):
            lines = key + (page * page_stride)[:, None] + column[None, :]
            # Prefetch the next page-table entries while these keys are copied.
            page = pages_of(table, start + width, most, BLOCK, LINE)
            if BIAS:
                own_biases = biases * inverse
                biases = biases_of(bias + first_head, named, HEADS, GROUP)
                named = pages_of(table, start + 2 * width, most, BLOCK, FLAT)
            for g in range(GROUP):
                stage = step % STAGES
                hopper.mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                at = lines + (first_head + g) // (HEADS // KEY_HEADS) * head_stride
                hopper.async_copy.async_copy_global_to_shared(ring.index(stage), at)
                hopper.async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                if BIAS:
                    own = gl.sum(gl.where((which == g)[None, :], own_biases, 0.0), 1)
                    own = gl.convert_layout(own, gl.SliceLayout(1, COLUMNS))
                    columns.index(stage).store(columns_of(own, COLUMNS))
                    hopper.fence_async_shared()
                arrive(full.index(stage))
                step += 1
        this_row, most = row_behind(row, slot, begin, tokens, offset, size, this_row)
    hopper.async_copy.commit_group()
    hopper.async_copy.wait_group(0)


@gluon.jit
def load_queries(
    queries, lmk_q, begin, tokens, first_head,
    WHICH: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Load the queries of half of the tokens to shared memory, one tile per head of the group."""
    DIM: gl.constexpr = queries.shape[2]
    PARTS: gl.constexpr = DIM // 8
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PARTS, PARTS], [4, 1], [1, 0])
    token = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    line = gl.minimum(token, tokens - 1).to(gl.int64) * HEADS + first_head
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LINES))
    for g in gl.static_range(GROUP):
        at = lmk_q + ((line + g) * DIM)[:, None] + column[None, :]
        hopper.async_copy.async_copy_global_to_shared(queries.index(WHICH * GROUP + g), at)
    hopper.async_copy.commit_group()
    hopper.async_copy.wait_group(0)
    hopper.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def ones_of(SCORES: gl.constexpr):
    """The operand [64, 16] of ones that is multiplied with `columns_of`, in registers."""
    ONES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, ONES))[None, :]
    none = gl.zeros([64, 16], gl.bfloat16, layout=ONES)
    return gl.where(column < 3, none + 1.0, none)


@gluon.jit
def products(query, shared, step, ones, none, BIAS: gl.constexpr):
    """Start the wgmma of a head's queries with the keys of a step, once these are loaded, including
    the bias."""
    _, ring, columns, full, _ = shared
    STAGES: gl.constexpr = ring.shape[0]
    stage = step % STAGES
    hopper.mbarrier.wait(full.index(stage), step // STAGES & 1)
    hopper.fence_async_shared()
    keys = ring.index(stage).permute((1, 0))
    value = hopper.warpgroup_mma(query, keys, none, use_acc=False, is_async=True)
    if BIAS:
        added = columns.index(stage).permute((1, 0))
        value = hopper.warpgroup_mma(ones, added, value, is_async=True)
    return value


@gluon.jit
def worth(products, scale, normalisers, g, total_stride, alive, NORMALISED: gl.constexpr):
    """Scores of one head minus its normalisers."""
    value = products * scale
    if NORMALISED:
        value -= gl.load(normalisers + g * total_stride, mask=alive, other=0.0)[:, None]
    return value


@gluon.jit
def score_pages(
    shared, task, WHICH: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    CB: gl.constexpr, BIAS: gl.constexpr, NORMALISED: gl.constexpr,
):  # fmt: skip
    """Score the pages for half of the tokens."""
    queries, ring, _, _, free = shared
    lmk_q, total, total_stride, found, tile, where, scale = task
    row, slot, begin, tokens, offset, size = tile
    first, width, first_head = where
    GROUP: gl.constexpr = HEADS // KV_HEADS
    FLYING: gl.constexpr = 2 if BIAS else 1
    STAGES: gl.constexpr = ring.shape[0]
    BLOCK: gl.constexpr = ring.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    own_begin = begin + WHICH * 64
    load_queries(queries, lmk_q, own_begin, tokens, first_head, WHICH, HEADS, GROUP)
    token = own_begin + gl.arange(0, 64, layout=ROWS)
    alive = token < tokens
    own_row = gl.load(row + token, mask=alive, other=-1).to(gl.int32)
    own_slot = gl.load(slot + token, mask=alive, other=0).to(gl.int32)
    candidates = gl.maximum(own_slot - offset, 0) // size
    line = token.to(gl.int64) * KV_HEADS + gl.program_id(1)
    normalisers = total + first_head.to(gl.int64) * total_stride + token
    ones = ones_of(SCORES)
    none = gl.zeros([64, BLOCK], gl.float32, layout=SCORES)
    step = 0
    this_row, most = row_behind(row, slot, begin, tokens, offset, size, -1)
    while this_row < 2147483647:
        mine = own_row == this_row
        own = gl.where(mine, candidates, 0)
        for start in range(first, most, width):
            best = gl.full([64, BLOCK], float("-inf"), gl.float32, layout=SCORES)
            if GROUP == 1:
                value = products(queries.index(WHICH), shared, step, ones, none, BIAS)
                value = hopper.warpgroup_mma_wait(0, deps=[value])
                arrive(free.index(step % STAGES))
                best = worth(value, scale, normalisers, 0, total_stride, alive, NORMALISED)
                step += 1
            else:
                for g in range(0, GROUP, 2):
                    # The product of the next head runs while that of this head is used.
                    query = queries.index(WHICH * GROUP + g)
                    value = products(query, shared, step, ones, none, BIAS)
                    query = queries.index(WHICH * GROUP + g + 1)
                    other = products(query, shared, step + 1, ones, none, BIAS)
                    value = hopper.warpgroup_mma_wait(FLYING, deps=[value])
                    value = worth(value, scale, normalisers, g, total_stride, alive, NORMALISED)
                    best = gl.maximum(best, value)
                    arrive(free.index(step % STAGES))
                    other = hopper.warpgroup_mma_wait(0, deps=[other])
                    other = worth(other, scale, normalisers, g + 1, total_stride, alive, NORMALISED)
                    best = gl.maximum(best, other)
                    arrive(free.index((step + 1) % STAGES))
                    step += 2
            store_scores(found, best, own, mine, line, start, CB)
        this_row, most = row_behind(row, slot, begin, tokens, offset, size, this_row)


@gluon.jit
def store_scores(found, best, own, mine, line, start, CB: gl.constexpr):
    """Store a tile's scores of candidates from `start` on, and the maxima of their blocks."""
    score, part_best, pages, blocks = found
    SCORES: gl.constexpr = best.type.layout
    ROWS: gl.constexpr = best.shape[0]
    BLOCK: gl.constexpr = best.shape[1]
    c = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
    # Columns beyond a token's candidates may hold any value. The mask is per pair of elements,
    # because partly written cache sectors take twice as long.
    written = mine[:, None] & (c < pages)[None, :]
    gl.store(score + (line * pages)[:, None] + c[None, :], best, mask=written)
    shown = gl.where(c[None, :] < own[:, None], best, float("-inf"))
    tops = gl.max(shown.reshape([ROWS, BLOCK // CB, CB]), 2)
    # Write whole cache sectors here too.
    TILE: gl.constexpr = BLOCK // CB
    EACH: gl.constexpr = 4 if TILE > 4 else TILE
    LANES: gl.constexpr = TILE // EACH
    TOPS: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [4, 1], [1, 0])
    block = start // CB + gl.arange(0, TILE, layout=gl.SliceLayout(0, TOPS))
    at = part_best + (gl.convert_layout(line, gl.SliceLayout(1, TOPS)) * blocks)[:, None]
    written = gl.convert_layout(mine, gl.SliceLayout(1, TOPS))[:, None] & (block < blocks)[None, :]
    gl.store(at + block[None, :], gl.convert_layout(tops, TOPS), mask=written)


@gluon.jit
def allocated(
    dtype: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Allocate tiles of queries, keys and biases in shared memory, and the barriers of loaded and
    free stages."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [QUERIES, 64, DIM], TILE)
    ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], TILE)
    columns = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 16], NARROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], SIGNAL)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], SIGNAL)
    for stage in gl.static_range(STAGES):
        # Arrivals: 128 copying threads, and one more for the biases.
        hopper.mbarrier.init(full.index(stage), 128 + 1)
        hopper.mbarrier.init(free.index(stage), 2)
    hopper.fence_async_shared()
    return queries, ring, columns, full, free


@gluon.jit(do_not_specialize=["tokens", "total_stride"])
def group_scores_kernel(
    lmk_q, key, bias, total, slot, row, page_table, score, part_best,
    tokens, total_stride, offset, size, scale, table_stride, page_stride, head_stride,
    pages, blocks,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, DIM: gl.constexpr,
    BLOCK: gl.constexpr, CB: gl.constexpr, STAGES: gl.constexpr,
    BIAS: gl.constexpr, NORMALISED: gl.constexpr,
):  # fmt: skip
    """As `group_kernel`, for keys of 16 bits and DIM 64 or 128."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    shared = allocated(lmk_q.dtype.element_ty, 2 * GROUP, STAGES, BLOCK, DIM)
    # Tokens at the end have the most candidates, so their programs are launched first.
    begin = (gl.num_programs(2) - 1 - gl.program_id(2)) * 128
    tile = (row, slot, begin, tokens, offset, size)
    where = (gl.program_id(0) * BLOCK, gl.num_programs(0) * BLOCK, gl.program_id(1) * GROUP)
    keys = (key, bias, page_table)
    strides = (table_stride, page_stride, head_stride)
    found = (score, part_best, pages, blocks)
    task = (lmk_q, total, total_stride, found, tile, where, scale)
    gl.warp_specialize(
        [
            (score_pages, (shared, task, FIRST, HEADS, KV_HEADS, CB, BIAS, NORMALISED)),
            (score_pages, (shared, task, SECOND, HEADS, KV_HEADS, CB, BIAS, NORMALISED)),
            (
                copy_pages,
                (shared, keys, strides, tile, where, scale, HEADS, KEY_HEADS, GROUP, BIAS),
            ),
        ],
        [4, 4],
        [208, 80],
    )
