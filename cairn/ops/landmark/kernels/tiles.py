"""The selected pages of landmark_attention for Hopper, where rows are so short that a tile of
tokens passes over all pages left of its windows: each line counts those that it selected.

In groups of warps, as `cairn.ops.attention.window_groups`. No page is read for a token by itself,
and nothing but results is stored; what is multiplied for lines that did not select a page is lost.
"""

from __future__ import annotations

from cairn.ops.attention.window_groups import (
    NOBODY,
    clear_tiles,
    copy_tiles,
    first_visible,
    lines_of,
    load_queries,
    row_behind,
    rows_of,
    stages,
    store_lines,
    tile_of,
)
from cairn.ops.flash_attn.groups import products
from cairn.ops.gpu import gl, gluon, hopper
from cairn.ops.groups import base_of, for_rows, multiply, scaled, summed, tell
from cairn.ops.landmark.kernels import pages

layer_totals = gluon.also(pages.layer_totals)


@gluon.jit
def pages_of(
    own_row, own_slot, this_row, window, SIZE: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """As `span_of`, of the pages of one block that lie left of the last window of a tile's tokens
    in a row, all slots of which are there: the first, the last (-1: there is none), a last slot."""
    first = first_visible(own_slot, window, SIZE, ALIGNED)
    count = gl.max(gl.where(own_row == this_row, first, 0), 0) // SIZE
    return 0, count - 1, NOBODY - 1


@gluon.jit
def totals_of(scores, window, place, mine, topk, K: gl.constexpr, SOFTMAX1: gl.constexpr):
    """`layer_totals` of lines [64], from their scores and their windows' lse."""
    SCORES: gl.constexpr = gl.BlockedLayout([1, K // 4], [8, 4], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    ROWS: gl.constexpr = place.type.layout
    place = gl.convert_layout(place, LINES)
    mine = gl.convert_layout(mine, LINES)
    k = gl.arange(0, K, layout=COLUMNS)
    shown = mine[:, None] & (k < topk)[None, :]
    score = gl.load(scores + (place * topk)[:, None] + k[None, :], mask=shown, other=float("-inf"))
    base, total, own = layer_totals(score, gl.convert_layout(window, LINES), SOFTMAX1)
    return (
        gl.convert_layout(base, ROWS),
        gl.convert_layout(total, ROWS),
        gl.convert_layout(own, ROWS),
    )


@gluon.jit
def next_of(chosen_of, found, topk, mine):
    """The found-th page that each line selected, -1 where there is none, and what its weight
    is: see `add_pages`."""
    indices, scores, base = chosen_of
    there = mine & (found < topk)
    page = gl.load(indices + found, mask=there, other=-1)
    score = gl.load(scores + found, mask=there, other=float("-inf"))
    return page, gl.exp2(score * 1.4426950408889634 - base)


@gluon.jit
def page_weights(logits, share, factor):
    """Weights of a page's slots that add up to the share of each line; 0 without one. The landmark,
    its last slot, has none."""
    LOGITS: gl.constexpr = logits.type.layout
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, LOGITS))
    logits = gl.where((key < 63)[None, :], logits, float("-inf"))
    base = base_of(gl.max(logits, 1)) * factor
    weights = gl.exp2(logits * factor - base[:, None])
    return weights * (share / gl.sum(weights, 1))[:, None]


@gluon.jit
def shares_of(block, ahead, found):
    """Shares of two pages in each line, and how many of its pages are behind: the next two of
    those, `ahead`, may be these."""
    page, share, next_page, next_share = ahead
    one = page == block
    first = gl.where(one, share, 0.0)
    page = gl.where(one, next_page, page)
    share = gl.where(one, next_share, share)
    two = page == block + 1
    return first, gl.where(two, share, 0.0), found + one.to(gl.int32) + two.to(gl.int32)


@gluon.jit
def add_pages(own_queries, shared, acc, chosen_of, mine, step, count, topk, factor):
    """acc and the attention inside each of a row's first `count` pages, by its share in the layer's
    softmax.

    Args:
        chosen_of: [64] where the pages that lines selected begin, ascending, where their scores do,
            and what to take off these, to base 2, so that they are logarithms of shares.
        step: the program's, with the first pair of pages.
    """
    _, cached_keys, cached_values, full, ready, free = shared
    STAGES: gl.constexpr = cached_keys.shape[0]
    ROWS: gl.constexpr = mine.type.layout
    LOGITS: gl.constexpr = ROWS.parent
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    none = gl.zeros([64, 64], gl.float32, layout=LOGITS)
    found = gl.zeros([64], gl.int32, layout=ROWS)
    page, share = next_of(chosen_of, found, topk, mine)
    next_page, next_share = next_of(chosen_of, found + 1, topk, mine)
    stage = step % STAGES
    key = cached_keys.index(stage)
    hopper.mbarrier.wait(full.index(2 * stage), step // STAGES & 1)
    one = products(own_queries, key.slice(0, 64, dim=0), none)
    two = products(own_queries, key.slice(64, 64, dim=0), none)
    one, two = hopper.warpgroup_mma_wait(0, deps=[one, two])
    tell(free.index(2 * stage))
    first, second, found = shares_of(0, (page, share, next_page, next_share), found)
    first_own = page_weights(one, first, factor).to(cached_keys.dtype)
    second_own = page_weights(two, second, factor).to(cached_keys.dtype)
    first_own = gl.convert_layout(first_own, WEIGHTS)
    second_own = gl.convert_layout(second_own, WEIGHTS)
    for block in range(2, count, 2):
        page, share = next_of(chosen_of, found, topk, mine)
        next_page, next_share = next_of(chosen_of, found + 1, topk, mine)
        before = step % STAGES
        phase = step // STAGES & 1
        step += 1
        stage = step % STAGES
        key = cached_keys.index(stage)
        hopper.mbarrier.wait(full.index(2 * stage), step // STAGES & 1)
        one = products(own_queries, key.slice(0, 64, dim=0), none)
        two = products(own_queries, key.slice(64, 64, dim=0), none)
        value = cached_values.index(before)
        hopper.mbarrier.wait(ready.index(before), phase)
        acc = multiply(first_own, value.slice(0, 64, dim=0), acc)
        acc = multiply(second_own, value.slice(64, 64, dim=0), acc)
        one, two = hopper.warpgroup_mma_wait(2, deps=[one, two])
        tell(free.index(2 * stage))
        first, second, found = shares_of(block, (page, share, next_page, next_share), found)
        first_weights = page_weights(one, first, factor).to(cached_keys.dtype)
        second_weights = page_weights(two, second, factor).to(cached_keys.dtype)
        acc = summed(acc, free.index(2 * before + 1))
        first_own = gl.convert_layout(first_weights, WEIGHTS)
        second_own = gl.convert_layout(second_weights, WEIGHTS)
    stage = step % STAGES
    value = cached_values.index(stage)
    hopper.mbarrier.wait(ready.index(stage), step // STAGES & 1)
    acc = multiply(first_own, value.slice(0, 64, dim=0), acc)
    acc = multiply(second_own, value.slice(64, 64, dim=0), acc)
    return summed(acc, free.index(2 * stage + 1))


@gluon.jit
def attend_pages(
    shared, given, tokens_of, task,
    WHICH: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, TOKENS: gl.constexpr,
    HP: gl.constexpr, K: gl.constexpr, SOFTMAX1: gl.constexpr,
):  # fmt: skip
    """The lines of group WHICH of a program's tiles."""
    own_queries = shared[0].index(WHICH)
    q, indices, scores, o_window, lse, o = given
    row, slot, tokens = tokens_of
    window, factor, topk = task
    DIM: gl.constexpr = own_queries.shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)
    column = gl.arange(0, DIM, layout=COLUMNS)
    none = gl.zeros([64, DIM], gl.float32, layout=SUMS)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(tokens, TOKENS) * KV_HEADS, gl.num_programs(0)):
        kv, begin = tile_of(tile, tokens, KV_HEADS, TOKENS)
        load_queries(own_queries, q, begin, tokens, kv, WHICH, HEADS, KV_HEADS, HP)
        tile_row, tile_slot = rows_of(row, slot, begin, tokens, TOKENS, 4)
        token, place, alive = lines_of(begin, tokens, kv, WHICH, HEADS, KV_HEADS, HP, ROWS)
        own_row = gl.load(row + token, mask=alive, other=-1).to(gl.int32)
        pages = indices + (token.to(gl.int64) * KV_HEADS + kv) * topk
        this_row = row_behind(tile_row, -1)
        while this_row < NOBODY:
            _, last, _ = pages_of(tile_row, tile_slot, this_row, window, 64, True)
            count = last + 1
            mine = own_row == this_row
            value = gl.load(lse + place, mask=mine, other=float("-inf"))
            base, total, own = totals_of(scores, value, place, mine, topk, K, SOFTMAX1)
            at = for_rows(o_window + place * DIM, none)[:, None] + column[None, :]
            beside = gl.load(at, mask=for_rows(mine, none)[:, None], other=0.0).to(gl.float32)
            acc = scaled(beside, own / total)
            chosen_of = (pages, scores + place * topk, base * 1.4426950408889634 + gl.log2(total))
            if count > 0:
                acc = add_pages(
                    own_queries, shared, acc, chosen_of, mine, step, count, topk, factor
                )
            step += gl.cdiv(count, 2)
            store_lines(o + place * DIM, acc, mine)
            this_row = row_behind(tile_row, this_row)


@gluon.jit(do_not_specialize=["tokens", "window"])
def page_tiles_kernel(
    q, keys, values, row, slot, page_table, indices, scores, o_window, lse, o, tokens, window,
    topk, scale, table_stride, k_page, k_head, v_page, v_head,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, TOKENS: gl.constexpr,
    HP: gl.constexpr, STAGES: gl.constexpr, K: gl.constexpr, SOFTMAX1: gl.constexpr,
):  # fmt: skip
    """o [T, HEADS, DIM] of a layer with pages of 64 slots.

    Args:
        indices, scores: of select_pages: [T, KV_HEADS, topk] and [T, HEADS, topk].
        o_window, lse: of windows that begin with a page.
        K: topk, padded to a power of two, >= 16.
        others: as in `window_groups_kernel`.
    """
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    SPAN: gl.constexpr = pages_of
    SIZE: gl.constexpr = 64
    ALIGNED: gl.constexpr = True
    MASKED: gl.constexpr = True
    shared = stages(q.dtype.element_ty, DIM, STAGES)
    tokens_of = (row, slot, tokens)
    given = (q, indices, scores, o_window, lse, o)
    task = (window, scale * 1.4426950408889634, topk)
    table = (page_table, table_stride)
    lines = (k_page, k_head, v_page, v_head)
    gl.warp_specialize(
        [
            (attend_pages, (
                shared, given, tokens_of, task,
                FIRST, HEADS, KV_HEADS, TOKENS, HP, K, SOFTMAX1,
            )),
            (attend_pages, (
                shared, given, tokens_of, task,
                SECOND, HEADS, KV_HEADS, TOKENS, HP, K, SOFTMAX1,
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
