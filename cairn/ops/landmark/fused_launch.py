"""How landmark_attention is launched for few tokens on a GPU: four launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import launch
from cairn.ops.early import early_option
from cairn.ops.landmark import page_launch, select_launch
from cairn.ops.landmark.kernels.fused import pick_kernel, read_kernel, scan_kernel

EARLY_TOKENS = 64
"""At most this many tokens launch kernels before the one in front is done: with more, programs that
wait would take the place of others that work."""
EARLY_READS = 8
"""At most this many launch so the kernel that reads their pages: those of more fill the device."""
PROGRAMS = 512
"""Programs that fill a large device, no more: a few beyond its places take as long again. Fewer
tokens are scored by more programs each."""
MOST_PROGRAMS = 256
"""Programs that score a token for one KV head, at most: one program adds up what they found."""
LEAST_PROGRAMS = 4
CHUNK = 512
"""Candidates that one program chooses from, unless there are very many."""
SHORT_CHUNK = 256
"""Candidates of a chunk that is chosen from as if there could be no more."""
MOST_LISTED, SHORT_LIST = 1024, 256
"""What all chunks of a token may find for one KV head, before the chunks grow; and what is ranked
as if there could be no more."""
LONE_TOKENS = 2
"""So many tokens wait for the ranking of their lists, more of them for the choice from chunks:
theirs may be smaller."""
WARP_NUMBERS = 1024
"""Scores that a warp of a choosing program holds."""
TILE_NUMBERS = 4096
"""Numbers of the summaries that a program scores at once; as many more are on their way."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a step is split up.

    Attributes:
        splits: programs that share a token's window, for one KV head.
        tile: candidates that a program scores at a time.
        programs: programs that share a token's candidates.
        chunk, chunks: candidates of a chunk, and how many chunks a row has.
        early: kernels are launched before the one in front is done.
        store: the step's completed pages get their summaries.
    """

    splits: int
    tile: int
    programs: int
    chunk: int
    chunks: int
    early: bool
    store: bool


def _plan(task: launch.Task, job: select_launch.Selection, store: bool) -> _Plan:
    tokens = task.q.shape[0]
    tile = max(1, TILE_NUMBERS // (job.group * job.width))
    wanted = max(LEAST_PROGRAMS, -(-PROGRAMS // (tokens * job.groups)))
    programs = max(1, min(-(-job.pages // tile), wanted, MOST_PROGRAMS))
    chunk = max(min(CHUNK, gpu.next_power_of_2(job.pages)), gpu.next_power_of_2(job.topk))
    listed = max(MOST_LISTED // 2 if tokens <= LONE_TOKENS else MOST_LISTED, job.topk)
    while -(-job.pages // chunk) * job.topk > listed:
        chunk *= 2
    # Programs read summaries before they wait: no token may have a page of the step as candidate.
    early = tokens <= min(EARLY_TOKENS, task.window) and gpu.launches_early(task.q.device)
    chunks = -(-job.pages // chunk)
    return _Plan(launch.splits_of(task), tile, programs, chunk, chunks, early, store)


def attend(
    task: launch.Task, job: select_launch.Selection, softmax1: bool, store: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, indices, scores and lse of landmark_attention.

    Args:
        task: the window; job: the selection, whose lse is not used; the same tokens in both.
        store: store summaries first; no page may be completed that a token has for a candidate.
    """
    tokens, heads = task.q.shape[:2]
    indices = job.empty(tokens, job.groups, job.topk, dtype=torch.int32)
    scores, lse = job.empty(tokens, heads, job.topk), job.empty(tokens, heads)
    out = gpu.empty(task.q.shape, task.q.dtype, task.q.device)
    if tokens == 0:
        return out, indices, scores, lse
    plan = _plan(task, job, store)
    pages = page_launch.Pages(
        *(task.q, task.k_cache, task.v_cache, task.row, task.page_table, indices, scores),
        task.q.shape[2] ** -0.5 if task.scale is None else task.scale,
    )
    part_o, part_lse = task.empty(plan.splits + pages.splits[0])
    u, tops, sums = _scan(task, job, plan, part_o, part_lse)
    found = _pick(job, plan, (u, tops, sums, part_lse), lse)
    _read(task, job, plan, pages, found, (part_o, part_lse))
    launch.merge(part_o, part_lse, out, None, softmax1=softmax1, early=plan.early)
    return out, indices, scores, lse


def _scan(
    task: launch.Task,
    job: select_launch.Selection,
    plan: _Plan,
    part_o: Tensor,
    part_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The window's splits; every candidate's score, and the normalisers' parts."""
    tokens, heads, dim = task.q.shape
    u = job.empty(tokens, job.pages, heads)
    tops, sums = (job.empty(tokens, plan.programs, heads) for _ in range(2))
    kinds = (job.summary_bias is not None, plan.store, plan.early, task.switches()[-1])
    stores = heads // job.groups if plan.store else 0
    scan_kernel[(plan.splits + plan.programs + stores, job.groups, tokens)](
        *(task.q, task.k_cache, task.v_cache, job.lmk_q, job.summary_key, job.bias),
        *(task.row, task.slot, task.page_table, part_o, part_lse, u, tops, sums),
        *(plan.splits, plan.programs, part_lse.shape[-1], *task.numbers()),
        *(job.offset, job.scale, *job.summary_key.stride()[:2], job.pages),
        *(heads, job.groups, job.summary_key.shape[1], dim, job.page_size),
        *(task.group, max(16, task.group), task.width, task.keys),
        *(gpu.next_power_of_2(job.page_size), plan.tile, *kinds),
        num_warps=4,
        num_stages=3,
        **early_option(plan.early),
    )
    return u, tops, sums


def _pick(
    job: select_launch.Selection, plan: _Plan, given: tuple[Tensor, ...], lse: Tensor
) -> tuple[Tensor, ...]:
    """The best pages of every chunk, as `pick_kernel` gives them."""
    tokens = job.slot.numel()
    shape = (tokens, job.groups, plan.chunks, job.topk)
    page, at = (job.empty(*shape, dtype=torch.int32) for _ in range(2))
    found = (page, at, job.empty(*shape), job.empty(*shape, job.heads // job.groups))
    u, tops, sums, part_lse = given
    short = min(SHORT_CHUNK, plan.chunk)
    pick_kernel[(plan.chunks, job.groups, tokens)](
        *(u, tops, sums, part_lse, job.row, job.slot, job.page_table, *found, lse),
        *(plan.splits, part_lse.shape[-1], plan.programs, job.page_table.stride(0)),
        *(job.offset, job.page_size),
        *(job.pages, job.topk, job.heads, job.groups, job.group),
        *(gpu.next_power_of_2(job.topk), plan.tile, short, (plan.chunk // short).bit_length()),
        *(gpu.next_power_of_2(plan.programs), gpu.next_power_of_2(plan.splits)),
        *(job.normalised, plan.early),
        num_warps=min(8, max(4, plan.chunk * job.group // WARP_NUMBERS)),
        **early_option(plan.early),
    )
    return found


def _read(
    task: launch.Task,
    job: select_launch.Selection,
    plan: _Plan,
    pages: page_launch.Pages,
    given: tuple[Tensor, ...],
    parts: tuple[Tensor, Tensor],
) -> None:
    """The selected pages' states behind the window's, and the results' pages and scores."""
    splits, each = pages.splits
    listed = gpu.next_power_of_2(plan.chunks * job.topk)
    order = job.empty(*pages.indices.shape, dtype=torch.int32)
    numbers = (pages.scale, *task.k_cache.stride()[:2], job.offset, job.topk)
    read_kernel[(splits, job.groups, task.q.shape[0])](
        *(task.q, task.k_cache, task.v_cache, task.slot, *given, order),
        *(pages.indices, pages.weights, *parts, *numbers),
        *(each, plan.splits, parts[1].shape[-1], plan.chunks, *pages.shape),
        *(max(16, pages.group), pages.width, pages.keys),
        *(plan.chunk, min(SHORT_LIST, listed), listed),
        *(gpu.next_power_of_2(each), plan.early, pages.precision),
        num_warps=2 if pages.width * pages.keys <= 4096 else 4,
        num_stages=2,
        **early_option(plan.early and task.q.shape[0] <= EARLY_READS),
    )
