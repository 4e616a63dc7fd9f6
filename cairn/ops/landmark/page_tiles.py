"""How landmark_attention passes over all pages of short rows in groups of warps."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import window_launch
from cairn.ops.attention.launch import Task
from cairn.ops.landmark.kernels.tiles import page_tiles_kernel
from cairn.ops.landmark.page_launch import Window

MOST_CHOSEN = 64
"""Most pages that a token selects."""
MOST_PAGES = {64: 80, 128: 160}
"""Of the longest row for which passing over all pages takes no longer than sorting those that are
selected, by a head's width. Measured on an H100, with a topk of 32, for 2,048 slots behind 2,048,
4,096 and 6,144: 82, 129 and 175 us, where sorted pages take 147, 153 and 155 (16 heads of 64 that
share 2); 219, 363 and 498, where they take 602, 633 and 651 (32 heads of 128)."""


def most_pages(k_cache: Tensor, topk: int) -> int:
    """Of the longest row of a cache that it pays for: pages of one block; 0: of none."""
    size, dim = k_cache.shape[2:]
    able = gpu.multiplies_in_groups(k_cache.device) and k_cache.dtype.itemsize == 2
    fitting = able and size == window_launch.BLOCK and topk <= MOST_CHOSEN
    return MOST_PAGES.get(dim, 0) if fitting else 0


def fits(task: Task, topk: int) -> bool:
    """Whether `attend` takes a task."""
    return most_pages(task.k_cache, topk) > 0 and window_launch.fits(task)


def worthwhile(task: Task, topk: int) -> bool:
    """Whether a task that `fits` takes no longer than by sorted pages: of short rows, with tiles
    for most processors."""
    enough = window_launch.FULL * gpu.processors(task.q.device)
    short = task.page_table.shape[1] <= most_pages(task.k_cache, topk)
    return short and window_launch.tiles(task) >= enough


def attend(task: Task, indices: Tensor, scores: Tensor, beside: Window) -> Tensor:
    """o [T, h_q, d] in q's dtype: the selected pages beside the windows of a task that `fits`.

    Args:
        indices, scores: of select_pages.
    """
    q, topk = task.q, indices.shape[2]
    out = gpu.empty(q.shape, q.dtype, q.device)
    if not len(out):
        return out
    heads, kv_heads, dim, _ = task.shape()
    window, factor, table_stride, *_ = task.numbers()
    blocks, places = window_launch.tables(task)
    page_tiles_kernel[(window_launch.programs(task),)](
        *(q, *blocks, task.row, task.slot, task.page_table),
        *(indices, scores, beside.o, beside.lse, out),
        *(len(out), window, topk, factor, table_stride, *places),
        *(heads, kv_heads, dim, window_launch.LINES // task.group, task.group),
        *(window_launch.STAGES[dim], max(16, gpu.next_power_of_2(topk)), beside.softmax1),
        num_warps=4,
    )
    return out
