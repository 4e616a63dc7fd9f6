"""A whole step of landmark_attention, for few tokens, in one launch.

Its programs are those of `fused`, ordered by their dependencies: a program only waits for programs
that started before it.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid_barrier import arrive
from cairn.ops.landmark.kernels.fused import pick, read, scan
from cairn.ops.pdl import launch_next


@triton.jit
def merge_line(
    part_o, part_lse, o, parts, token, kv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GP: tl.constexpr,
    DP: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, SOFTMAX1: tl.constexpr,
):  # fmt: skip
    """Write o [T, HEADS, DIM] of one token and KV head, merged as by `merge_kernel` from parts
    stored by programs of the same launch.

    Args:
        GP: heads of the group, padded to a power of two.
        PARTS: parts, padded to a power of two. AHEAD: parts that are loaded at a time.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    own = g < group
    place = token.to(tl.int64) * HEADS + kv * group + g
    p = tl.arange(0, PARTS)
    shown = (p < parts)[:, None] & own[None, :]
    all_logs = part_lse + (place * parts)[None, :] + p[:, None]
    logs = tl.load(all_logs, mask=shown, other=float("-inf"), cache_modifier=".cg")
    best = tl.max(logs, 0)
    if SOFTMAX1:
        best = tl.maximum(best, 0.0)
    base = tl.where(best == float("-inf"), 0.0, best)
    # Add the parts in sequence: in a reduction over threads, the compiler may or may not fuse
    # products into the sum, which changes the rounding.
    total = tl.exp(-base) if SOFTMAX1 else tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    wide = (d < DIM)[None, :]
    for begin in range(0, parts, AHEAD):
        for n in tl.static_range(AHEAD):
            alive = own & (begin + n < parts)
            at = place * parts + begin + n
            log = tl.load(part_lse + at, mask=alive, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(
                part_o + (at * DIM)[:, None] + d[None, :],
                mask=alive[:, None] & wide, other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            weight = tl.exp(log - base)
            total += weight
            acc += part * weight[:, None]
    safe = tl.where(total != 0, total, 1.0)
    value = (acc / safe[:, None]).to(o.dtype.element_ty)
    tl.store(o + (place * DIM)[:, None] + d[None, :], value, mask=own[:, None] & wide)


@triton.jit
def finish_line(
    counters, wanted, part_o, part_lse, o, parts, token, kv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GP: tl.constexpr,
    DP: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, SOFTMAX1: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Run `merge_line` in the last of the line's `wanted` programs, and reset the line's counters
    [APART] to 0."""
    if arrive(counters) == wanted - 1:
        merge_line(
            part_o, part_lse, o, parts, token, kv,
            HEADS, KV_HEADS, DIM, GP, DP, PARTS, AHEAD, SOFTMAX1,
        )  # fmt: skip
        tl.store(counters + tl.arange(0, APART), tl.zeros([APART], tl.int32))


@triton.jit
def place_in(lines, scans, chunks, reads, lag):
    """The line and item of this program in a whole step, and whether they exist.

    Programs are numbered in rounds: round r has the scan of line r, the pick of line r - lag and
    the read of line r - 2 lag. So with many lines, the programs that a program depends on are
    mostly finished when it starts.
    """
    size = scans + chunks + reads
    item = tl.program_id(0) % size
    behind = tl.where(item < scans, 0, tl.where(item < scans + chunks, lag, 2 * lag))
    line = tl.program_id(0) // size - behind
    return line, item, (line >= 0) & (line < lines)


@triton.jit(
    early=("key", "bias", "row", "slot", "page_table"),
    do_not_specialize=["splits", "programs", "parts", "reads", "lag", "lines"],
)
def step_kernel(
    q, k_cache, v_cache, lmk_q, key, bias, row, slot, page_table,
    part_o, part_lse, u, tops, sums, found_page, found_at, found_value, counters, out, indices,
    scores, lse,
    splits, programs, parts, chunks, reads, lag, lines,
    window, scale, table_stride, page_stride, head_stride,
    offset, score_scale, key_page_stride, key_head_stride, pages, topk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, GP: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
    STORES: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
    K: tl.constexpr, SHORT: tl.constexpr, LEVELS: tl.constexpr, PROGRAMS: tl.constexpr,
    SPLITS: tl.constexpr, NORMALISED: tl.constexpr, LISTED: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr, SOFTMAX1: tl.constexpr, APART: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`scan`, `pick` and `read` of every line, a token and KV head, and the merge of its parts.

    Args:
        counters: [lines, APART], all 0, see `arrivals`: for every line, the programs that have
            read, scanned and picked.
    """
    launch_next(PDL)
    scans = splits + programs + STORES
    line, item, there = place_in(lines, scans, chunks, reads, lag)
    if there == 0:
        return
    kv = line % KV_HEADS
    token = (line // KV_HEADS).to(tl.int64)
    counters += line * APART
    if item < scans:
        scan(
            q, k_cache, v_cache, lmk_q, key, bias, row, slot, page_table, page_table, part_o,
            part_lse, u, tops, sums, counters + 1, splits, programs, parts, window, scale,
            table_stride, page_stride, head_stride, offset, score_scale, key_page_stride,
            key_head_stride, pages, token, kv, item,
            HEADS, KV_HEADS, KEY_HEADS, DIM, SIZE, GP, ROWS, DP, KEYS, PAGE, TILE, BIAS, STORES,
            SINGLE, PDL, PRECISION,
        )  # fmt: skip
    elif item < scans + chunks:
        pick(
            u, tops, sums, part_lse, row, slot, page_table, found_page, found_at, found_value,
            lse, counters + 1, counters + 2, splits, parts, programs, table_stride, offset, pages,
            topk, chunks, token, kv, item - scans,
            HEADS, KV_HEADS, SIZE, GP, TILE, K, SHORT, LEVELS, PROGRAMS, SPLITS, NORMALISED, PDL,
        )  # fmt: skip
    else:
        read(
            q, k_cache, v_cache, None, None, None, slot, u, found_page, found_at, found_value,
            indices, scores, part_o, part_lse, counters + 2, 0, scale, page_stride, head_stride,
            offset, pages, topk, reads, splits, parts, chunks, token, kv, item - scans - chunks,
            HEADS, KV_HEADS, DIM, SIZE, ROWS, DP, PAGE, SHORT << (LEVELS - 1), LISTED,
            EACH, PDL, PRECISION, STAGES,
        )  # fmt: skip
        finish_line(
            counters, reads, part_o, part_lse, out, parts, token, kv,
            HEADS, KV_HEADS, DIM, GP, DP, PARTS, AHEAD, SOFTMAX1, APART,
        )  # fmt: skip
