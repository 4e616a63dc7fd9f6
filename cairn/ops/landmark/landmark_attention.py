"""A whole layer of landmark attention: window, selection, pages and their merge."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.attention import launch, tiles
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, check_caches, check_queries, check_slots, expect
from cairn.ops.landmark import (
    fused_launch,
    loops,
    select_launch,
    short_launch,
)
from cairn.ops.landmark.blend_window import blend_window
from cairn.ops.landmark.checks import check_keys, check_rule, check_summaries
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.page_weights import shared_weights
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.landmark.select_task import Task, short_pages, task_of
from cairn.ops.landmark.store_prior_summary import (
    completed_pages,
    store_completed,
    store_prior_summary,
)
from cairn.ops.registry import op


@op(mutates=("summary_key", "summary_bias"))
def landmark_attention(
    q: Tensor,
    lmk_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    summary_key: Tensor,
    summary_bias: Tensor | None,
    row: Tensor,
    slot: Tensor,
    page_table: Tensor,
    window: int,
    topk: int,
    softmax1: bool,
    scale: float | None = None,
    strategy: str = "hils",
    store_summaries: bool = False,
    chunked: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """window_attention, select_pages, page_weights, page_attention and blend_window in one op.

    The window is aligned to pages, and the last slot of a page is no key.

    Args:
        q, lmk_q: [T, h_q, d].
        k_cache, v_cache: [pages, h_kv, S, d], or quantized.
        summary_key: [pages, h_R, d], any strides; h_R = h_q or h_kv.
        summary_bias: [pages, h_q] float32, or None.
        row, slot: [T] int64. Slots 0 .. slot of the row are written.
        page_table: [rows, max_pages] int32, logical to physical page.
        window: slots, >= 1.
        topk: pages selected per KV head.
        softmax1: add a logit of 0, whose weight is dropped, to the softmax over pages and window.
        scale: softmax scale of all dot products; None: d ** -0.5.
        strategy: as in select_pages.
        store_summaries: first store, for every token in the last slot of a page, the prior_summary
            of that page with its lmk_q as the query. Then h_R is h_q, and summary_key has lmk_q's
            dtype.
        chunked: as in window_attention.
    Returns:
        o [T, h_q, d] in q's dtype; indices [T, h_kv, topk] int32 and scores [T, h_q, topk]
        (group: [T, h_kv, topk]) float32 as select_pages gives them; lse [T, h_q] float32 of the
        window. `shared_weights` of the last two are the weights.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or as select_pages.
    """
    where = (row, slot, page_table)
    if store_summaries:
        completed = completed_pages(row, slot, page_table, k_cache.shape[2])
        given = (lmk_q, k_cache, completed, summary_key, summary_bias, scale)
        store_prior_summary.reference(*given)
    o_window, lse = window_attention.reference(
        q, k_cache, v_cache, *where, window, scale, aligned=True, mask_landmarks=True
    )
    indices, scores = select_pages.reference(
        lmk_q,
        summary_key,
        summary_bias,
        lse,
        *where,
        k_cache.shape[2],
        window,
        topk,
        scale,
        strategy,
        k_cache.shape[1],
    )
    weights, window_weight = shared_weights(scores, lse, softmax1)
    o_pages = page_attention.reference(
        q, k_cache, v_cache, row, page_table, indices, weights, scale
    )
    return blend_window(o_pages, o_window, window_weight, q.dtype), indices, scores, lse


@landmark_attention.check
def _(call: Call) -> None:
    name = "landmark_attention"
    check_rule(name, call.window, call.topk, call.strategy)
    pages, kv_heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.q)
    check_keys(name, call.k_cache)
    tokens, heads = check_queries(name, "q", call.q, kv_heads, dim)
    expect(name, "lmk_q", call.lmk_q, call.q.shape, FLOATS, call.q)
    check_summaries(
        name, call.lmk_q, call.summary_key, call.summary_bias, pages, kv_heads, call.strategy
    )
    check_slots(name, tokens, call.row, call.slot, call.page_table, call.q)
    if call.store_summaries:
        expect(name, "summary_key", call.summary_key, (pages, heads, dim), (call.lmk_q.dtype,))


@landmark_attention.fake
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    indices, scores = _task(call).empty(call.q.shape[0], call.topk, call.q.device)
    return (
        torch.empty_like(call.q),
        indices,
        scores,
        call.q.new_empty(call.q.shape[:2], dtype=torch.float32),
    )


def _short_on_gpu(call: Call) -> bool:
    size = call.k_cache.shape[2]
    return (
        _on_gpu(call)
        and call.page_table.shape[1] <= short_pages(size, call.window, call.topk)
        and short_launch.accepts(call.q, call.lmk_q, size, call.topk)
    )


def _windows(call: Call) -> launch.Task:
    """The window attention of a call."""
    where = (call.row, call.slot, call.page_table, call.window, call.scale)
    return launch.Task(
        call.q, call.k_cache, call.v_cache, *where, aligned=True, mask_landmarks=True
    )


def _selection(call: Call) -> select_launch.Selection:
    """The selection of a call, for strategies that do not need the windows' lse."""
    task = _task(call)
    lse = gpu.empty((0,), torch.float32, call.q.device)
    where = (call.row, call.slot, call.page_table, call.k_cache.shape[2], call.topk)
    return select_launch.Selection(
        call.lmk_q,
        call.summary_key,
        call.summary_bias,
        lse,
        *where,
        task.scale,
        call.window - 1,
        task.groups,
        task.normalised,
    )


def _task(call: Call) -> Task:
    return task_of(call.lmk_q, call.summary_key, call.strategy, call.scale, call.k_cache.shape[1])


def _store(call: Call) -> None:
    """Store the summaries of completed pages, if the call asks for it."""
    if call.store_summaries:
        where = (call.row, call.slot, call.page_table)
        summaries = (call.summary_key, call.summary_bias, call.scale)
        store_completed(call.lmk_q, call.k_cache, *where, *summaries)


def _few_on_gpu(call: Call) -> bool:
    tiled = launch.in_tiles(call.q, call.k_cache.shape[1], call.chunked, launch.LANDMARK_LINES)
    if tiled or not _on_gpu(call):
        return False
    # The same launch stores summaries, so no token of the step may select a page that the step
    # completes: with at most `window` tokens, these pages are inside the window.
    return not call.store_summaries or call.q.shape[0] <= call.window


def _on_gpu(call: Call) -> bool:
    return (
        call.strategy != "group"
        and call.window > 0
        and call.k_cache.shape[2] > 1
        and launch.accepts(call.q, call.k_cache, call.v_cache)
        and select_launch.accepts(
            call.lmk_q, call.summary_key, call.page_table, call.k_cache.shape[1], call.topk
        )
    )


@landmark_attention.implementation(
    "triton_few", devices=gpu.DEVICES, when=_few_on_gpu, replayed=True
)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores concurrently with the window, then the selection, the pages, and one merge."""
    own, job = _windows(call), _selection(call)
    return fused_launch.attend(own, job, call.softmax1, call.store_summaries)


@landmark_attention.implementation(
    "triton_short", devices=gpu.DEVICES, when=_short_on_gpu, replayed=True
)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All scores, then window and pages in one kernel."""
    _store(call)
    return short_launch.attend(_windows(call), _selection(call), call.softmax1)


def _few_tokens(call: Call) -> bool:
    return (
        call.strategy in ("hils", "softmax_head", "head")
        and call.window > 0
        and call.k_cache.shape[2] > 1
        and call.q.dtype == call.lmk_q.dtype == call.summary_key.dtype
        and call.summary_key.stride(-1) == 1
        and tiles.few_in_loops(call.q, call.k_cache, call.v_cache, call.row)
    )


@landmark_attention.implementation("numba", devices=cpu.DEVICES, when=_few_tokens)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A decode step."""
    _store(call)
    task = _task(call)
    tokens, heads, dim = call.q.shape
    results = (
        call.q.new_empty((tokens, heads, dim)),
        call.q.new_empty((tokens, task.groups, call.topk), dtype=torch.int32),
        call.q.new_empty((tokens, heads, call.topk), dtype=torch.float32),
        call.q.new_empty((tokens, heads), dtype=torch.float32),
    )
    loops.attend_tokens(
        *map(
            cpu.as_array, (call.q.contiguous(), call.lmk_q.contiguous(), call.k_cache, call.v_cache)
        ),
        cpu.line(call.summary_key),
        (*call.summary_key.stride()[:2], heads // call.summary_key.shape[1]),
        cpu.array_or_empty(call.summary_bias, torch.float32, 2),
        *map(cpu.as_array, (call.row, call.slot, call.page_table.contiguous())),
        (call.window, call.topk, bool(call.softmax1), task.normalised),
        (np.float32(dim**-0.5 if call.scale is None else call.scale), np.float32(task.scale)),
        *map(cpu.as_array, results),
    )
    return results


@landmark_attention.implementation("composed")
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ops in sequence, each by its fastest implementation."""
    _store(call)
    caches, where = (call.k_cache, call.v_cache), (call.row, call.slot, call.page_table)
    size, kv_heads = call.k_cache.shape[2], call.k_cache.shape[1]
    kinds = {"aligned": True, "mask_landmarks": True, "chunked": call.chunked}
    o_window, lse = window_attention(call.q, *caches, *where, call.window, call.scale, **kinds)
    indices, scores = select_pages(
        call.lmk_q,
        call.summary_key,
        call.summary_bias,
        lse,
        *where,
        size,
        call.window,
        call.topk,
        call.scale,
        call.strategy,
        kv_heads,
    )
    weights, window_weight = shared_weights(scores, lse, call.softmax1)
    o_pages = page_attention(
        call.q, *caches, call.row, call.page_table, indices, weights, call.scale
    )
    return blend_window(o_pages, o_window, window_weight, call.q.dtype), indices, scores, lse


landmark_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 2e-2)},
    "weights of pages and window are rounded to bfloat16 where they meet the values, in other "
    "places than in the definition",
)
