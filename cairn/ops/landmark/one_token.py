"""A landmark layer of one token on the CPU.

What a decode step of one request pays for, beside its weights, is the number of calls: between two
layers the weights of one run through the caches, and every call is cold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.attention import tiles as tiling
from cairn.ops.landmark import select_cpu
from cairn.ops.landmark.select_task import Task


@dataclass(frozen=True, slots=True)
class Query:
    """The token and what it may read.

    Attributes:
        q, lmk_q: [1, h_q, d], of the caches' dtype.
        k_cache, v_cache: [pages, h_kv, S, d], contiguous, S > 1.
        table: [max_pages] int32, its row of the page table.
        slot: its slot.
        first: first slot of its window, the start of a page.
        scale: of all dot products.
    """

    q: Tensor
    lmk_q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    slot: int
    first: int
    scale: float


def attend(
    query: Query,
    summary_key: Tensor,
    summary_bias: Tensor | None,
    task: Task,
    topk: int,
    softmax1: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of landmark_attention; task.summed is False."""
    o_window, lse = _window(query)
    pages = query.first // query.k_cache.shape[2]
    # A logit of the window, and with softmax1 a zero, whose share is lost.
    beside = lse.view(-1, 1)
    if softmax1:
        beside = torch.nn.functional.pad(beside, (0, 1))
    width = min(topk, pages)
    if width == 0:
        weight = torch.softmax(beside, dim=-1)[:, :1]
        return (weight * o_window).to(query.q.dtype), *task.empty(1, topk, query.q.device), lse
    physical = query.table[:pages]
    u = _scores(query, physical, summary_key, summary_bias)
    found, taken = _best(u, lse, task, width)
    weights = torch.softmax(torch.cat([taken, beside], dim=-1), dim=-1)
    o_pages = _attend_pages(query, physical, found, weights[:, :width])
    out = torch.addcmul(o_pages, weights[:, width : width + 1], o_window).to(query.q.dtype)
    indices, scores = found.to(torch.int32), taken
    if width < topk:
        indices, scores = (
            torch.nn.functional.pad(x, (0, topk - width), value=value)
            for x, value in ((indices, -1), (scores, -torch.inf))
        )
    return out, indices.unsqueeze(0), scores.unsqueeze(0), lse


def _window(query: Query) -> tuple[Tensor, Tensor]:
    """Window attention: o [1, h_q, d] and lse [1, h_q]; it holds a key, for S > 1."""
    lines = paging.lines(query.k_cache, query.table, query.first, query.slot, True)
    return tiling.attend_lines(query.q, query.k_cache, query.v_cache, lines, query.scale)


def _scores(query: Query, physical: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """u [h_q, P] float32 of the pages."""
    keys = select_cpu.gather(key, physical).float()
    heads = keys.shape[1]
    z = query.lmk_q.float().reshape(heads, -1, query.lmk_q.shape[2])
    start = z.new_zeros(1, 1, 1)
    if bias is not None:
        start = select_cpu.gather(bias, physical).t().unflatten(0, (heads, -1))
    u = torch.baddbmm(
        start, z, keys.permute(1, 2, 0), beta=int(bias is not None), alpha=query.scale
    )
    return u.view(-1, physical.numel())


def _best(u: Tensor, lse: Tensor, task: Task, width: int) -> tuple[Tensor, Tensor]:
    """Places [h_kv, width] of the best in u [h, P], ascending, and their u [h, width]."""
    pages = u.shape[1]
    if width == pages:
        return torch.arange(pages).repeat(task.groups, 1), u
    score = u
    if task.normalised:
        # One more column with the window's lse makes log_softmax u - Z.
        score = torch.log_softmax(torch.cat([u, lse.view(-1, 1)], dim=-1), dim=-1)[:, :pages]
    score = score.unflatten(0, (task.groups, -1)).amax(dim=1)
    values, places = score.topk(width + 1, dim=-1)
    if any(a == b for a, b in values[:, -2:].tolist()):
        places = select_cpu.topk_places(score, width)
    found = places[:, :width].sort(dim=-1).values
    by_group = u.view(task.groups, -1, pages)
    place = found.unsqueeze(1).expand(-1, by_group.shape[1], -1)
    return found, by_group.gather(2, place).view(-1, width)


def _attend_pages(query: Query, physical: Tensor, found: Tensor, weights: Tensor) -> Tensor:
    """Selected pages' attention states, weighted by weights [h_q, K] and added up: [1, h_q, d]."""
    _, heads, size, dim = query.k_cache.shape
    pages = physical.index_select(0, found.view(-1)).view(heads, -1)
    lines = torch.add(paging.line_offsets(heads, 1, 1)[:, 0], pages, alpha=heads).view(-1)
    k, v = (
        cache.view(-1, size * dim).index_select(0, lines).view(heads, -1, dim)
        for cache in (query.k_cache, query.v_cache)
    )
    q = query.q.reshape(heads, -1, dim).float()
    scores = torch.baddbmm(
        q.new_zeros(1, 1, 1), q, k.float().transpose(1, 2), beta=0, alpha=query.scale
    ).view(heads, q.shape[1], -1, size)
    scores[..., -1] = -torch.inf
    v.view(-1, size, dim)[:, -1] = 0
    p = torch.softmax(scores, dim=-1).mul_(weights.view(heads, q.shape[1], -1, 1))
    return torch.bmm(p.to(v.dtype).flatten(2), v).view(query.q.shape)
