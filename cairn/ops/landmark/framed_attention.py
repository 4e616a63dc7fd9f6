"""landmark_attention of few tokens over pages in host memory, some of them cached in frames on the
device."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import launch
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, check_caches, check_queries, check_slots, expect
from cairn.ops.landmark import fused_launch, select_launch
from cairn.ops.landmark.blend_window import blend_window
from cairn.ops.landmark.checks import check_keys, check_rule, check_summaries
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.page_weights import shared_weights
from cairn.ops.landmark.prior_summary import prior_summary
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.landmark.select_task import task_of
from cairn.ops.landmark.store_prior_summary import completed_pages
from cairn.ops.registry import op


@op(mutates=("summary_key", "summary_bias"))
def framed_attention(
    q: Tensor,
    lmk_q: Tensor,
    window_k: Tensor,
    window_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_frames: Tensor,
    v_frames: Tensor,
    frame_of: Tensor,
    summary_key: Tensor,
    summary_bias: Tensor | None,
    row: Tensor,
    slot: Tensor,
    window_table: Tensor,
    page_table: Tensor,
    window: int,
    topk: int,
    softmax1: bool,
    strategy: str = "hils",
    store_summaries: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """landmark_attention whose window and selected pages are read from different caches.

    The window is read from window_k and window_v. A selected page is read from its frame if it has
    one, else from k_cache and v_cache, which may be host memory that is mapped into the device's
    address space.

    Args:
        q, lmk_q: [T, h_q, d].
        window_k, window_v: [window pages, h_kv, S, d], or quantized: pages under windows.
        k_cache, v_cache: [pages, h_kv, S, d] of the same format: all complete pages.
        k_frames, v_frames: [F, h_kv, S, d] of the same format: copies of some of them.
        frame_of: [h_kv, pages] int32, the frame that holds a head's part of a page; below 0: none.
        summary_key: [pages, h_R, d], any strides; h_R = h_q or h_kv.
        summary_bias: [pages, h_q] float32, or None.
        row, slot: [T] int64. Slots 0 .. slot of the row are written.
        window_table: [rows, max_pages] int32, logical page to page of window_k; only entries of
            pages under a token's window are read.
        page_table: [rows, max_pages] int32, logical page to page of k_cache and of the summaries.
        window, topk, softmax1, strategy: as in landmark_attention.
        store_summaries: as there; the keys that are summed up are read from window_k.
    Returns:
        As landmark_attention.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    size = window_k.shape[2]
    if store_summaries:
        window_page, done = (
            completed_pages(row, slot, t, size) for t in (window_table, page_table)
        )
        real = done >= 0
        key, bias = prior_summary.reference(lmk_q[real], window_k, window_page[real], None)
        summary_key[done[real]] = key
        if summary_bias is not None:
            summary_bias[done[real]] = bias
    o_window, lse = window_attention.reference(
        q, window_k, window_v, row, slot, window_table, window, aligned=True, mask_landmarks=True
    )
    indices, scores = select_pages.reference(
        lmk_q, summary_key, summary_bias, lse, row, slot, page_table, size, window, topk,
        None, strategy, window_k.shape[1],
    )  # fmt: skip
    weights, window_weight = shared_weights(scores, lse, softmax1)
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    head, page = (frame_of >= 0).nonzero(as_tuple=True)
    frame = frame_of[head, page].long()
    k_cache[page, head], v_cache[page, head] = k_frames[frame, head], v_frames[frame, head]
    o_pages = page_attention.reference(q, k_cache, v_cache, row, page_table, indices, weights)
    return blend_window(o_pages, o_window, window_weight, q.dtype), indices, scores, lse


@framed_attention.check
def _(call: Call) -> None:
    name = "framed_attention"
    check_rule(name, call.window, call.topk, call.strategy)
    pages, kv_heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.q)
    check_keys(name, call.k_cache)
    wanted, dtypes = (None, *call.k_cache.shape[1:]), (call.k_cache.dtype,)
    for what in ("k_cache", "v_cache", "window_k", "window_v", "k_frames", "v_frames"):
        expect(name, what, getattr(call, what), wanted, dtypes, call.q, -1)
    tokens, heads = check_queries(name, "q", call.q, kv_heads, dim)
    expect(name, "lmk_q", call.lmk_q, call.q.shape, FLOATS, call.q)
    expect(name, "frame_of", call.frame_of, (kv_heads, pages), INT32, call.q, -1)
    check_summaries(
        name, call.lmk_q, call.summary_key, call.summary_bias, pages, kv_heads, call.strategy
    )
    check_slots(name, tokens, call.row, call.slot, call.page_table, call.q)
    expect(name, "window_table", call.window_table, call.page_table.shape, INT32, call.q, 1)
    if call.store_summaries:
        expect(name, "summary_key", call.summary_key, (pages, heads, dim), (call.lmk_q.dtype,))


@framed_attention.fake
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    task = task_of(call.lmk_q, call.summary_key, call.strategy, None, call.window_k.shape[1])
    indices, scores = task.empty(call.q.shape[0], call.topk, call.q.device)
    lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
    return torch.empty_like(call.q), indices, scores, lse


def _accepts(call: Call) -> bool:
    return (
        call.strategy != "group"
        and call.window_k.shape[2] > 1
        and call.window_table.stride() == call.page_table.stride()
        and launch.accepts(call.q, call.window_k, call.window_v)
        and select_launch.accepts(
            call.lmk_q, call.summary_key, call.page_table, call.window_k.shape[1], call.topk
        )
        # The same launch stores summaries, so no token of the step may select a page that the step
        # completes.
        and not (call.store_summaries and call.q.shape[0] > call.window)
    )


@framed_attention.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernels of landmark_attention for few tokens."""
    where = (call.row, call.slot)
    own = launch.Task(
        call.q, call.window_k, call.window_v, *where, call.window_table, call.window, None,
        aligned=True, mask_landmarks=True,
    )  # fmt: skip
    task = task_of(call.lmk_q, call.summary_key, call.strategy, None, call.window_k.shape[1])
    job = select_launch.Selection(
        call.lmk_q, call.summary_key, call.summary_bias,
        gpu.empty((0,), torch.float32, call.q.device), *where, call.page_table,
        call.window_k.shape[2], call.topk, task.scale, call.window - 1, task.groups,
        task.normalised,
    )  # fmt: skip
    in_frames = fused_launch.InFrames(
        call.k_cache, call.v_cache, call.k_frames, call.v_frames, call.frame_of
    )
    return fused_launch.attend(own, job, call.softmax1, call.store_summaries, in_frames)


framed_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 2e-2)}, "as landmark_attention: weights are rounded in other places"
)
