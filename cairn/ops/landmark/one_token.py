"""A landmark layer of one token on the CPU.

What a decode step of one request pays for, beside its weights, is the number of calls: between two
layers the weights of one run through the caches, and every call is cold. So torch does what reads
the caches, numpy, whose calls cost a fifth, everything that is small, and what follows from the
page table is worked out once for all layers of a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.attention import tiles as tiling
from cairn.ops.landmark import select_cpu
from cairn.ops.landmark.select_task import Task

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


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


class _Place(NamedTuple):
    """Where the token's pages lie.

    Attributes:
        lines: [h_kv, n] int64, the window's keys, of a cache seen as lines [.., d].
        pages: [P] int64, physical pages of its candidates.
        where: the same as an index of a pool; a slice where they lie side by side.
    """

    lines: Tensor
    pages: Ints
    where: slice | Tensor


def attend(
    query: Query,
    summary_key: Tensor,
    summary_bias: Tensor | None,
    task: Task,
    topk: int,
    softmax1: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of landmark_attention; task.summed is False."""
    q, heads, size = query.q, *query.k_cache.shape[1:3]
    held = query.table[: query.slot // size + 1].numpy()
    place = _place(held.tobytes(), heads, size, query.first, query.slot)
    o_window, lse = tiling.attend_lines(q, query.k_cache, query.v_cache, place.lines, query.scale)
    window: Floats = lse.numpy().reshape(-1, 1)
    width = min(topk, len(place.pages))
    if width == 0:
        share = torch.from_numpy(_shares(window, softmax1))
        return (share * o_window).to(q.dtype), *task.empty(1, topk, q.device), lse
    u = _scores(query, place, summary_key, summary_bias)
    found = _best(u, window, task, width)
    taken = u[np.arange(len(u))[:, None], found.repeat(len(u) // len(found), axis=0)]
    shares = _shares(np.concatenate((taken, window), axis=1), softmax1)
    o_pages = _attend_pages(query, place.pages[found], shares[:, :width])
    out = torch.addcmul(o_pages, torch.from_numpy(shares[:, width:]), o_window).to(q.dtype)
    indices, scores = torch.from_numpy(found.astype(np.int32)), torch.from_numpy(taken)
    if width < topk:
        indices, scores = (
            torch.nn.functional.pad(x, (0, topk - width), value=value)
            for x, value in ((indices, -1), (scores, -torch.inf))
        )
    return out, indices.unsqueeze(0), scores.unsqueeze(0), lse


@functools.lru_cache(maxsize=4)
def _place(held: bytes, heads: int, size: int, first: int, slot: int) -> _Place:
    """The place of a token in `slot`, whose pages are `held` (int32), with a window from `first`.

    Known again by the pages themselves: all layers of a step ask for the same.
    """
    table = np.frombuffer(held, dtype=np.int32).astype(np.int64)
    lines = paging.lines(heads, size, torch.from_numpy(table), first, slot, True)
    pages = table[: first // size]
    index: slice | Tensor = torch.from_numpy(pages)
    if len(pages) and bool((np.diff(pages) == 1).all()):
        index = slice(int(pages[0]), int(pages[-1]) + 1)
    return _Place(lines.contiguous(), pages, index)


def _scores(query: Query, place: _Place, key: Tensor, bias: Tensor | None) -> Floats:
    """u [h_q, P] of the pages."""
    keys = select_cpu.gather(key, place.where).float()
    heads = keys.shape[1]
    z = torch.mul(query.lmk_q.float(), query.scale).view(heads, -1, keys.shape[2])
    u: Floats = torch.bmm(z, keys.permute(1, 2, 0)).view(-1, len(place.pages)).numpy()
    if bias is not None:
        u += select_cpu.gather(bias, place.where).numpy().T
    return u


def _best(u: Floats, window: Floats, task: Task, width: int) -> Ints:
    """Places [h_kv, width] of the best in u [h_q, P], ascending; of equal ones the first."""
    pages = u.shape[1]
    if width == pages:
        return np.broadcast_to(np.arange(pages), (task.groups, pages))
    score = u
    if task.normalised:
        every = np.concatenate((u, window), axis=1)
        top = every.max(axis=1, keepdims=True)
        score = u - (top + np.log(np.exp(every - top).sum(axis=1, keepdims=True)))
    score = score.reshape(task.groups, -1, pages).max(axis=1)
    least = np.partition(score, pages - width, axis=1)[:, pages - width, None]
    found = (score >= least).nonzero()[1]
    if len(found) != task.groups * width:  # equal ones, or no numbers
        order = np.argsort(-score, axis=1, kind="stable")
        found = np.sort(order[:, :width], axis=1)
    places: Ints = found.reshape(task.groups, width)
    return places


def _shares(logits: Floats, softmax1: bool) -> Floats:
    """Softmax of logits [h_q, n]; softmax1: beside a zero, whose share is lost."""
    top = logits.max(axis=1, keepdims=True)
    if softmax1:
        top = np.maximum(top, 0)
    shares: Floats = np.exp(logits - top)
    total = shares.sum(axis=1, keepdims=True)
    shares /= total + np.exp(-top) if softmax1 else total
    return shares


def _attend_pages(query: Query, pages: Ints, shares: Floats) -> Tensor:
    """Selected pages' attention states, weighted by shares [h_q, K] and added up.

    Args:
        pages: [h_kv, K], physical.
    Returns:
        [1, h_q, d] float32.
    """
    _, heads, size, dim = query.k_cache.shape
    lines = torch.from_numpy((pages * heads + np.arange(heads)[:, None]).reshape(-1))
    # The last slot of a page is no key: it is not even taken.
    k, v = (
        cache.view(-1, size * dim)[:, : (size - 1) * dim].index_select(0, lines).float()
        for cache in (query.k_cache, query.v_cache)
    )
    q = torch.mul(query.q.float(), query.scale).view(heads, -1, dim)
    scores = torch.bmm(q, k.view(heads, -1, dim).transpose(1, 2))
    p = torch.softmax(scores.view(heads, q.shape[1], -1, size - 1), dim=-1)
    p *= torch.from_numpy(shares).view(*p.shape[:3], 1)
    return torch.bmm(p.flatten(2), v.view(heads, -1, dim)).view(query.q.shape)
