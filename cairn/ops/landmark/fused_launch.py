"""How landmark_attention is launched for few tokens on a GPU: four launches."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import launch
from cairn.ops.landmark import page_launch, select_launch
from cairn.ops.landmark.kernels.fused import pick_kernel, scan_kernel

EARLY_TOKENS = 16
"""At most this many tokens launch each kernel before the one in front is done: with more, programs
that wait would take the place of others that work."""


@functools.cache
def _knows_early(index: int) -> bool:
    """Whether a device can launch a kernel before the one in front is done."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


def attend(
    task: launch.Task, job: select_launch.Selection, softmax1: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, indices, scores and lse of landmark_attention.

    Args:
        task: the window; job: the selection, whose lse is not used; the same tokens in both.
    """
    tokens, heads = task.q.shape[:2]
    indices = job.empty(tokens, job.groups, job.topk, dtype=torch.int32)
    scores, lse = job.empty(tokens, heads, job.topk), job.empty(tokens, heads)
    out = torch.empty_like(task.q)
    if tokens == 0:
        return out, indices, scores, lse
    device = task.q.device
    early = tokens <= EARLY_TOKENS and device.type == "cuda" and _knows_early(device.index)
    pages = page_launch.Pages(
        *(task.q, task.k_cache, task.v_cache, task.row, task.page_table, indices, scores),
        task.q.shape[2] ** -0.5 if task.scale is None else task.scale,
    )
    splits = launch.splits_of(task)
    parts = splits + pages.splits[0]
    part_o, part_lse = task.empty(parts)
    _scan(task, job, splits, part_o, part_lse, (indices, scores, lse), early)
    page_launch.attend_splits(pages, part_o, part_lse, splits, early=early)
    launch.merge(part_o, part_lse, out, None, softmax1=softmax1, early=early)
    return out, indices, scores, lse


def _scan(
    task: launch.Task,
    job: select_launch.Selection,
    splits: int,
    part_o: Tensor,
    part_lse: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    early: bool,
) -> None:
    """The window's splits and the selection: indices, scores and lse."""
    tokens, heads, dim = task.q.shape
    size, parts = job.page_size, part_lse.shape[-1]
    u = job.empty(tokens, job.pages, heads)
    part_best, part_sum = (job.empty(tokens, job.blocks, heads) for _ in range(2))
    scorers, constants = select_launch.scoring(job)
    tile, block, has_bias = constants[-3:]
    scan_kernel[(splits + scorers, job.groups, tokens)](
        *(task.q, task.k_cache, task.v_cache, job.lmk_q, job.summary_key, job.bias),
        *(task.row, task.slot, task.page_table, part_o, part_lse, u, part_best, part_sum),
        *(splits, parts, *task.numbers(), job.offset, job.scale, *job.summary_key.stride()[:2]),
        *(job.pages, job.blocks, heads, job.groups, job.summary_key.shape[1], dim, size),
        *(task.group, max(16, task.group), task.width, task.keys, tile, block, has_bias),
        *(early, task.switches()[-1]),
        num_warps=2,
        num_stages=3,
        **launch.early_option(early),
    )
    pick_kernel[(job.groups, tokens)](
        *(u, part_best, part_sum, part_lse, task.slot, *results, splits, parts),
        *(job.offset, size, job.pages, job.blocks, job.topk, heads, job.groups),
        *select_launch.choosing(job, job.group),
        *(gpu.next_power_of_2(splits), job.normalised, early),
        num_warps=4,
        **launch.early_option(early),
    )
