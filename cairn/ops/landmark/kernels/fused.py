"""Kernels of landmark_attention for few tokens, and their building blocks.

A selected page's weight in a layer's softmax is exp of its score, and the window's is exp of its
lse: selected pages and splits of the window are partial states of one ordinary merge. So the
window's splits and the scores are independent and run concurrently in `scan`, as do the summaries
of pages that the step completes, which are not candidates of its tokens. `pick` finds the best
candidates of every chunk; `read` finds the best of those and attends to their pages. Here they are
separate launches; in `step` they are programs of one launch that wait for each other by counters.

With PDL a launch begins before the previous one has finished, and then waits for it; inputs that no
kernel of the step changes (row, slot, page table, summaries of earlier steps) are read before the
wait.
"""

from __future__ import annotations

from cairn.ops import gpu
from cairn.ops.attention.kernels import attend_split, load_rows, store_rows
from cairn.ops.gpu import tl, triton
from cairn.ops.grid_barrier import arrive, await_arrivals
from cairn.ops.landmark.kernels.choose import head_normalisers
from cairn.ops.landmark.kernels.pages import page_output
from cairn.ops.landmark.kernels.select import candidates_of
from cairn.ops.landmark.kernels.summary import store_summary
from cairn.ops.pdl import await_previous, launch_next
from cairn.ops.select_k.kernels import largest

MAX_COMPARED = gpu.constant(1 << 14)
"""Listed pages times places of a program that are compared at once; more would not fit into
registers."""


@triton.jit
def load_summaries(
    key, bias, page, inside, head, own, page_stride, head_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Load keys [TILE, GP, DP] and biases [TILE, GP] float32 of some pages and heads."""
    d = tl.arange(0, DP)
    page = page.to(tl.int64)
    shown = inside[:, None] & own[None, :]
    wide = shown[:, :, None]
    if DP != DIM:
        wide = wide & (d < DIM)[None, None, :]
    at = key + page[:, None] * page_stride + (head // (HEADS // KEY_HEADS))[None, :] * head_stride
    at = at[:, :, None] + d[None, None, :]
    summary = tl.load(at, mask=wide, other=0.0, eviction_policy="evict_first")
    extra = tl.zeros_like(shown.to(tl.float32))
    if BIAS:
        extra = tl.load(bias + page[:, None] * HEADS + head[None, :], mask=shown, other=0.0)
    return summary, extra


@triton.jit
def score_tiles(
    lmk_q, key, bias, slot, row, page_table, u, tops, sums,
    offset, scale, table_stride, page_stride, head_stride, pages, token, kv, program, programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write u [T, HEADS, pages] of a token's candidates for the heads of one KV head, and the
    maximum and sum of exponentials of this program's candidates, [T, KV_HEADS, programs, group].

    Args:
        pages: allocated candidates per row, a multiple of 16.
        program, programs: index of this program and number of programs that share the tiles of TILE
            candidates.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    candidates = candidates_of(slot, token, offset, SIZE)
    table = page_table + tl.load(row + token) * table_stride
    g = tl.arange(0, GP)
    head = kv * group + g
    own = g < group
    line = token.to(tl.int64) * KV_HEADS + kv
    step = programs * TILE
    c = program * TILE + tl.arange(0, TILE)
    page = tl.load(table + c, mask=c < candidates, other=0)
    next_page = tl.load(table + c + step, mask=c + step < candidates, other=0)
    summary, extra = load_summaries(
        key, bias, page, c < candidates, head, own, page_stride, head_stride,
        HEADS, KEY_HEADS, DIM, DP, BIAS,
    )  # fmt: skip
    await_previous(PDL)
    query = load_rows(lmk_q + (token.to(tl.int64) * HEADS + head) * DIM, own, DIM, DP)
    query = query.to(tl.float32) * scale
    top = tl.full([TILE, GP], float("-inf"), tl.float32)
    summed = tl.zeros([TILE, GP], tl.float32)
    for _ in range(program * TILE, candidates, step):
        # Prefetch the next tile, and the page-table entries of the one after it, while this one is
        # summed.
        next_summary, next_extra = load_summaries(
            key, bias, next_page, c + step < candidates, head, own, page_stride, head_stride,
            HEADS, KEY_HEADS, DIM, DP, BIAS,
        )  # fmt: skip
        next_page = tl.load(table + c + 2 * step, mask=c + 2 * step < candidates, other=0)
        value = tl.sum(summary.to(tl.float32) * query[None, :, :], 2) + extra
        shown = (c < candidates)[:, None] & own[None, :]
        at = (token.to(tl.int64) * HEADS + head) * pages
        tl.store(u + at[None, :] + c[:, None], value, mask=shown)
        value = tl.where(shown, value, float("-inf"))
        higher = tl.maximum(top, value)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        summed = summed * tl.exp(top - base) + tl.exp(value - base)
        top = higher
        c += step
        summary = next_summary
        extra = next_extra
    best = tl.max(top, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    summed = tl.sum(summed * tl.exp(top - base[None, :]), 0)
    at = (line * programs + program) * group + g
    tl.store(tops + at, best, mask=own)
    tl.store(sums + at, summed, mask=own)


@triton.jit
def scan(
    q, k_cache, v_cache, lmk_q, key, bias, row, slot, page_table, window_table,
    part_o, part_lse, u, tops, sums, scanned, splits, programs, parts, window, scale,
    table_stride, page_stride, head_stride, offset, score_scale, key_page_stride, key_head_stride,
    pages, token, kv, program,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, GP: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
    STORES: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first `splits` programs attend to the window of a token and KV head, the next `programs`
    score candidates, and STORES programs store the summaries of the page that the token completes,
    if it does, each for a part of the group's heads.

    Args:
        window_table: page table of k_cache and v_cache. page_table: page table of the summaries.
        scanned: counter of the programs that have attended or scored; or None.
        ROWS, GP: heads of the group, padded to a power of two, ROWS >= 16.
        PAGE: SIZE, padded to a power of two >= 16.
        STORES: 0, or a divisor of the group's heads.
        SINGLE: as in `attend_split`.
    """
    if program < splits:
        attend_split(
            q, k_cache, v_cache, row, slot, window_table, part_o, part_lse, parts,
            window, scale, table_stride, page_stride, head_stride, token, kv, program, splits,
            HEADS, KV_HEADS, DIM, SIZE, ROWS, DP, KEYS, True, True, PRECISION, SINGLE,
            PDL,
        )  # fmt: skip
        if scanned is not None:
            arrive(scanned)
    elif program < splits + programs:
        # The number of programs with work depends on the row's length.
        if (program - splits) * TILE < candidates_of(slot, token, offset, SIZE):
            score_tiles(
                lmk_q, key, bias, slot, row, page_table, u, tops, sums,
                offset, score_scale, table_stride, key_page_stride, key_head_stride, pages,
                token, kv, program - splits, programs,
                HEADS, KV_HEADS, KEY_HEADS, DIM, SIZE, GP, DP, TILE, BIAS, PDL,
            )  # fmt: skip
            if scanned is not None:
                arrive(scanned)
    elif STORES > 0:
        await_previous(PDL)
        place = tl.load(slot + token)
        if place % SIZE == SIZE - 1:
            logical = tl.load(row + token) * table_stride + place // SIZE
            page = tl.load(page_table + logical).to(tl.int64)
            window_page = tl.load(window_table + logical).to(tl.int64)
            group: tl.constexpr = HEADS // KV_HEADS
            query = lmk_q + token.to(tl.int64) * HEADS * DIM
            head = kv * group + program - splits - programs
            for n in range(group // STORES):
                store_summary(
                    query, k_cache, window_page, page, head + n * STORES, key, bias,
                    score_scale, page_stride, head_stride, key_page_stride, key_head_stride,
                    HEADS, KV_HEADS, DIM, SIZE, DP, PAGE, True, BIAS,
                )  # fmt: skip


@triton.jit(
    early=("key", "bias", "row", "slot", "page_table", "window_table"),
    do_not_specialize=["splits", "programs", "parts"],
)
def scan_kernel(
    q, k_cache, v_cache, lmk_q, key, bias, row, slot, page_table, window_table,
    part_o, part_lse, u, tops, sums,
    splits, programs, parts, window, scale, table_stride, page_stride, head_stride,
    offset, score_scale, key_page_stride, key_head_stride, pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, GP: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
    STORES: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`scan` of a token and KV head."""
    launch_next(PDL)
    scan(
        q, k_cache, v_cache, lmk_q, key, bias, row, slot, page_table, window_table, part_o,
        part_lse, u, tops, sums, None, splits, programs, parts, window, scale, table_stride,
        page_stride, head_stride, offset, score_scale, key_page_stride, key_head_stride, pages,
        tl.program_id(2), tl.program_id(1), tl.program_id(0),
        HEADS, KV_HEADS, KEY_HEADS, DIM, SIZE, GP, ROWS, DP, KEYS, PAGE, TILE, BIAS, STORES,
        SINGLE, PDL, PRECISION,
    )  # fmt: skip


@triton.jit
def pick_chunk(
    u, tops, sums, part_lse, row, page_table, found_page, found_at, found_value, lse, scanned,
    splits, parts, programs, table_stride, pages, topk, chunks, token, kv, chunk, begin, candidates,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GP: tl.constexpr, K: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr,
    NORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`pick`, for CHUNK candidates from `begin` on."""
    c = begin + tl.arange(0, CHUNK)
    table = page_table + tl.load(row + token) * table_stride
    physical = tl.load(table + c, mask=c < candidates, other=0)
    await_previous(PDL)
    if scanned is not None:
        await_arrivals(scanned, splits + tl.minimum(programs, (candidates + TILE - 1) // TILE))
    group: tl.constexpr = HEADS // KV_HEADS
    line = token * KV_HEADS + kv
    g = tl.arange(0, GP)
    own = g < group
    head = token * HEADS + kv * group + g
    # Load all scores independently, up to a multiple of the vector width, and mask non-candidates
    # afterwards: a mask in the load would split the vector loads.
    at = (head * pages)[:, None] + c[None, :]
    shown = own[:, None] & (c < (candidates + 15) // 16 * 16)[None, :]
    value = tl.load(u + at, mask=shown, other=float("-inf"), cache_modifier=".cg")
    s = tl.arange(0, SPLITS)
    logs = tl.load(
        part_lse + head[None, :] * parts + s[:, None],
        mask=(s < splits)[:, None] & own[None, :], other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    p = tl.arange(0, PROGRAMS)
    at = (line * programs + p)[:, None] * group + g[None, :]
    # Programs without a candidate have not written their results.
    shown = ((p < programs) & (p * TILE < candidates))[:, None] & own[None, :]
    tops_of = tl.load(tops + at, mask=shown, other=float("-inf"), cache_modifier=".cg")
    sums_of = tl.load(sums + at, mask=shown, other=0.0, cache_modifier=".cg")
    top = tl.max(logs, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    window = base + tl.log(tl.sum(tl.exp(logs - base[None, :]), 0))
    if chunk == 0:
        tl.store(lse + head, window, mask=own)
    normaliser = head_normalisers(tops_of, sums_of, window, NORMALISED)
    best = tl.max(tl.where(own[:, None], value - normaliser[:, None], float("-inf")), 0)
    total = tl.minimum(candidates - begin, CHUNK)
    taken, order, found = largest(best, c < candidates, total, topk, CHUNK)
    at = (line * chunks + chunk) * topk
    tl.store(found_page + at + order, c, mask=taken)
    tl.store(found_at + at + order, physical, mask=taken)
    tl.store(found_value + at + order, best, mask=taken)
    rest = tl.arange(0, K)
    tl.store(found_page + at + rest, rest * 0 - 1, mask=(rest >= found) & (rest < topk))


@triton.jit
def pick(
    u, tops, sums, part_lse, row, slot, page_table, found_page, found_at, found_value, lse,
    scanned, picked, splits, parts, programs, table_stride, offset, pages, topk, chunks,
    token, kv, chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, GP: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr, SHORT: tl.constexpr, LEVELS: tl.constexpr,
    PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, NORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Select the topk best of a chunk of candidates of one token and KV head, in order of their
    pages.

    found_page (logical; -1 where there are fewer), found_at (physical) and found_value: [T,
    KV_HEADS, chunks, topk]. Chunks beyond the last candidate are not written. Also writes the
    window's lse [T, HEADS], merged from its splits.

    Args:
        scanned: as in `scan`; picked: counter of finished chunks (those with a candidate, and the
            first); or None.
        K, PROGRAMS, SPLITS: topk, programs and splits, padded to a power of two.
        TILE: tile size of the scan.
        SHORT, LEVELS: a chunk has SHORT << (LEVELS - 1) candidates; for a partial chunk a smaller
            power-of-two multiple of SHORT is used, chosen by the row's actual length.
    """
    candidates = candidates_of(slot, token, offset, SIZE)
    begin = chunk * (SHORT << (LEVELS - 1))
    if (chunk == 0) | (begin < candidates):
        left = candidates - begin
        for level in tl.static_range(LEVELS):
            # Use the narrowest level that holds the remaining candidates.
            fits = (left <= (SHORT << level)) | (level == LEVELS - 1)
            if fits & ((level == 0) | (left > (SHORT << level) // 2)):
                pick_chunk(
                    u, tops, sums, part_lse, row, page_table, found_page, found_at, found_value,
                    lse, scanned, splits, parts, programs, table_stride, pages, topk, chunks,
                    token, kv, chunk, begin, candidates,
                    HEADS, KV_HEADS, GP, K, TILE, SHORT << level, PROGRAMS, SPLITS, NORMALISED,
                    PDL,
                )  # fmt: skip
        if picked is not None:
            arrive(picked)


@triton.jit(early=("row", "slot", "page_table"), do_not_specialize=["splits", "parts", "programs"])
def pick_kernel(
    u, tops, sums, part_lse, row, slot, page_table, found_page, found_at, found_value, lse,
    splits, parts, programs, table_stride, offset, pages, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, GP: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr, SHORT: tl.constexpr, LEVELS: tl.constexpr,
    PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, NORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`pick` of a chunk, KV head and token."""
    launch_next(PDL)
    pick(
        u, tops, sums, part_lse, row, slot, page_table, found_page, found_at, found_value, lse,
        None, None, splits, parts, programs, table_stride, offset, pages, topk,
        tl.num_programs(0), tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0),
        HEADS, KV_HEADS, SIZE, GP, TILE, K, SHORT, LEVELS, PROGRAMS, SPLITS, NORMALISED, PDL,
    )  # fmt: skip


@triton.jit
def pages_at(
    found_page, found_at, found_value, line, candidates, place, topk, chunks,
    CHUNK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Logical (-1: none) and physical page ids, int32, at some positions of the selection.

    Args:
        place: [N] int32 positions; those from topk on are masked.
        LISTED: chunks * topk, padded to a power of two.
    """
    found_page += line * chunks * topk
    found_at += line * chunks * topk
    found_value += line * chunks * topk
    if candidates > CHUNK:
        # Pages ascend over chunks, so the first of equal values is still the lowest page.
        i = tl.arange(0, LISTED)
        shown = (i < chunks * topk) & (i // topk * CHUNK < candidates)
        page = tl.load(found_page + i, mask=shown, other=-1, cache_modifier=".cg")
        physical = tl.load(found_at + i, mask=shown, other=0, cache_modifier=".cg")
        value = tl.load(found_value + i, mask=shown, other=float("-inf"), cache_modifier=".cg")
        taken, rank, _ = largest(value, page >= 0, chunks * topk, topk, LISTED)
        if LISTED * place.shape[0] <= MAX_COMPARED:
            own = taken[:, None] & (rank[:, None] == place[None, :])
            page = tl.max(tl.where(own, page[:, None], -1), 0)
            physical = tl.max(tl.where(own, physical[:, None], 0), 0)
        else:
            listed, listed_at = page, physical
            page, physical = place * 0 - 1, place * 0
            for n in range(place.shape[0]):
                this = tl.arange(0, place.shape[0]) == n
                own = taken & (rank == tl.sum(tl.where(this, place, 0), 0))
                page = tl.where(this, tl.max(tl.where(own, listed, -1), 0), page)
                physical = tl.where(this, tl.max(tl.where(own, listed_at, 0), 0), physical)
    else:
        page = tl.load(found_page + place, mask=place < topk, other=-1, cache_modifier=".cg")
        physical = tl.load(found_at + place, mask=place < topk, other=0, cache_modifier=".cg")
    return page, physical


@triton.jit
def read(
    q, k_cache, v_cache, k_frames, v_frames, frame_of, slot, u, found_page, found_at, found_value,
    indices, scores, part_o, part_lse, picked,
    total_pages, scale, page_stride, head_stride, offset, pages, topk, reads, first, parts, chunks,
    token, kv, split,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to every `reads`-th of the selected pages of one token and KV head (strided, so that
    few pages are distributed too). Writes their weighted average and the logarithm of their summed
    weight to part_o [T, HEADS, parts, DIM] and part_lse [T, HEADS, parts] from index `first` on,
    and their entries of indices [T, KV_HEADS, topk] and scores [T, HEADS, topk].

    Args:
        frame_of: [KV_HEADS, total_pages], frame of each page; below 0: the page is read from
            k_cache and v_cache. None: all pages are.
        u: from `score_tiles`. found_page, found_at, found_value: from `pick`.
        picked: as in `pick`.
        LISTED: as in `pages_at`.
        GP: heads of the group, padded to a power of two, >= 16.
        EACH: most pages per program, padded to a power of two.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    line = token * KV_HEADS + kv
    m = tl.arange(0, GP)
    head = token * HEADS + kv * group + m
    alive = m < group
    candidates = candidates_of(slot, token, offset, SIZE)
    await_previous(PDL)
    query = load_rows(q + head * DIM, alive, DIM, DP)
    if picked is not None:
        await_arrivals(picked, tl.maximum(1, (candidates + CHUNK - 1) // CHUNK))
    e = tl.arange(0, EACH)
    place = split + e * reads
    logical, physical = pages_at(
        found_page, found_at, found_value, line, candidates, place, topk, chunks, CHUNK, LISTED
    )
    tl.store(indices + line * topk + place, logical, mask=place < topk)
    best = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    at_head = kv.to(tl.int64) * head_stride
    # With fewer selected pages the last places are empty; a short row selects none.
    selected = tl.sum((logical >= 0).to(tl.int32), 0)
    for i in tl.range(0, selected, num_stages=STAGES):
        this = tl.max(tl.where(e == i, logical, 0), 0)
        page = tl.max(tl.where(e == i, physical, 0), 0).to(tl.int64)
        own = tl.load(
            u + head * pages + this, mask=alive, other=float("-inf"), cache_modifier=".cg"
        )
        k_head, v_head = k_cache + at_head, v_cache + at_head
        if frame_of is not None:
            frame = tl.load(frame_of + kv * total_pages + page)
            k_head = tl.where(frame >= 0, k_frames + at_head, k_head)
            v_head = tl.where(frame >= 0, v_frames + at_head, v_head)
            page = tl.where(frame >= 0, frame, page)
        value, summed = page_output(
            query, k_head, v_head, page * page_stride,
            True, scale * 1.4426950408889634, DIM, SIZE, DP, KEYS, PRECISION,
        )  # fmt: skip
        tl.store(scores + head * topk + split + i * reads, own, mask=alive)
        higher = tl.maximum(best, own)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay, weight = tl.exp(best - base), tl.exp(own - base)
        total = total * decay + weight
        acc = acc * decay[:, None] + value * (weight / summed)[:, None]
        best = higher
    rest = alive[:, None] & ((e >= selected) & (place < topk))[None, :]
    at = scores + (head * topk)[:, None] + place[None, :]
    tl.store(at, tl.full([GP, EACH], float("-inf"), tl.float32), mask=rest)
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    at = head * parts + first + split
    tl.store(part_lse + at, tl.where(seen, best + tl.log(safe), float("-inf")), mask=alive)
    store_rows(part_o + at * DIM, acc / safe[:, None], alive, DIM, DP)


@triton.jit(early=("slot",), do_not_specialize=["first", "parts"])
def read_kernel(
    q, k_cache, v_cache, k_frames, v_frames, frame_of, slot, u, found_page, found_at, found_value,
    indices, scores, part_o, part_lse,
    total_pages, scale, page_stride, head_stride, offset, pages, topk, first, parts, chunks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`read` of a split of the selected pages, KV head and token."""
    launch_next(PDL)
    read(
        q, k_cache, v_cache, k_frames, v_frames, frame_of, slot, u, found_page, found_at,
        found_value, indices, scores, part_o, part_lse, None, total_pages, scale, page_stride,
        head_stride, offset, pages, topk, tl.num_programs(0), first, parts, chunks,
        tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0),
        HEADS, KV_HEADS, DIM, SIZE, GP, DP, KEYS, CHUNK, LISTED, EACH, PDL, PRECISION, STAGES,
    )  # fmt: skip
