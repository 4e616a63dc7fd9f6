"""Launch of landmark_attention on a GPU for rows so short that every page before the window is
selected."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import launch
from cairn.ops.landmark.kernels.short import short_kernel, short_scores_kernel
from cairn.ops.landmark.select_launch import Selection
from cairn.ops.landmark.tuning import TUNING


def accepts(q: Tensor, lmk_q: Tensor, page_size: int, topk: int) -> bool:
    """Whether a program can hold a page's slots, and all pages' summaries and scores."""
    width = max(16, gpu.next_power_of_2(q.shape[2]))
    page, pages = (max(16, gpu.next_power_of_2(n)) for n in (page_size, topk))
    return (
        page * width * q.element_size() <= TUNING.short_max_bytes
        and pages * width * lmk_q.element_size() <= TUNING.short_max_bytes
        and pages <= TUNING.short_max_pages
    )


def attend(
    task: launch.Task, job: Selection, softmax1: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of landmark_attention; task: the window attention, aligned to pages."""
    tokens, heads, _ = task.q.shape
    o, lse = task.empty(dtype=task.q.dtype)
    scores = job.empty(tokens, heads, job.topk)
    indices = job.empty(tokens, job.groups, job.topk, dtype=torch.int32)
    if tokens == 0:
        return o, indices, scores, lse
    width = gpu.next_power_of_2(job.topk)
    short_scores_kernel[(heads, -(-tokens // TUNING.short_tokens))](
        **gpu.select_arguments(short_scores_kernel, job.arguments()),
        scores=scores,
        indices=indices,
        tokens=tokens,
        TOKENS=TUNING.short_tokens,
        K=max(16, width),
        num_warps=4,
    )
    rows, options = launch.tile(task)
    each = max(1, rows // task.group)
    short_kernel[(job.groups, -(-tokens // each))](
        **task.arguments(),
        scores=scores,
        o=o,
        lse=lse,
        tokens=tokens,
        topk=job.topk,
        TOKENS=each,
        GP=task.group,
        PAGE=max(16, gpu.next_power_of_2(job.page_size)),
        K=width,
        SOFTMAX1=softmax1,
        **options,
    )
    return o, indices, scores, lse
