"""A landmark layer of a few tokens a row on the CPU: a decode step.

What such a step pays for, beside the weights and pages it reads, is the number of calls: between
two layers the weights of one run through the caches, and every call is cold. So torch does what
reads the caches, for as many tokens at once as fit a core's own, numpy, whose calls cost a fifth,
everything that is small, and what follows from the page table is worked out once for all layers of
a step. Tokens go together whose numbers of candidates are alike: little is computed for nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.ops.attention import lines, paging
from cairn.ops.landmark import select_cpu
from cairn.ops.landmark.select_task import Task
from cairn.ops.scratch import scratch

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_SUMMARIES = 1024
"""Most summaries that are scored at once, unless one token has more."""
_FEW_QUERIES = 32
"""For fewer it costs less to widen values than to begin a product in bfloat16."""


@dataclass(frozen=True, slots=True)
class Query:
    """The tokens, what they may read, and how.

    Attributes:
        q, lmk_q: [T, h_q, d], of the caches' dtype, T > 0.
        k_cache, v_cache: [pages, h_kv, S, d], contiguous, S > 1.
        summary_key, summary_bias: as landmark_attention takes them.
        row, slot: [T] int64.
        page_table: [rows, max_pages] int32.
        window: slots, >= 1.
        topk, softmax1: as landmark_attention takes them.
        task: what the strategy means; its `summed` is False.
    """

    q: Tensor
    lmk_q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    summary_key: Tensor
    summary_bias: Tensor | None
    row: Tensor
    slot: Tensor
    page_table: Tensor
    window: int
    topk: int
    softmax1: bool
    task: Task


class _Group(NamedTuple):
    """Tokens that go together.

    Attributes:
        tokens: [n] int64; None: all of the step.
        pages: [n, P] int64, physical pages of their candidates; where a token has fewer, its first
            one again. If P > topk, all have more than topk.
        where: the same as an index of a pool; a slice where one token's lie side by side.
        late: [n, 1, P] float32, -inf behind a token's candidates, 0 before; None: all have P.
        owner, head: [n * h_kv, 1] int64, token and KV head of every set of pages.
    """

    tokens: Tensor | None
    pages: Ints
    where: slice | Tensor
    late: Floats | None
    owner: Ints
    head: Ints


class _Place(NamedTuple):
    """Where the step's keys lie: those of the windows, and the groups' pages."""

    window: lines.Lines
    groups: tuple[_Group, ...]


def attend(query: Query) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of landmark_attention."""
    q, slot, size = query.q, query.slot.numpy(), query.k_cache.shape[2]
    held = query.page_table.numpy()[query.row.numpy(), : int(slot.max()) // size + 1]
    rule = (query.k_cache.shape, query.window, query.topk)
    place = _place(held.tobytes(), slot.tobytes(), *rule)
    caches = (query.k_cache, query.v_cache)
    o_window, lse = lines.attend(q, *caches, place.window, query.task.scale)
    parts = [_attend_group(query, group, o_window, lse) for group in place.groups]
    if len(parts) == 1:
        return (*parts[0], lse)
    results = (torch.empty_like(q), *query.task.empty(q.shape[0], query.topk, q.device))
    for group, part in zip(place.groups, parts, strict=True):
        for whole, some in zip(results, part, strict=True):
            whole[group.tokens] = some
    return (*results, lse)


@functools.lru_cache(maxsize=4)
def _place(held: bytes, slots: bytes, shape: torch.Size, window: int, topk: int) -> _Place:
    """The place of tokens in `slots` (int64), whose rows begin with the pages `held` (int32).

    Known again by the pages themselves: all layers of a step ask for the same.
    """
    heads, size = shape[1:3]
    slot = np.frombuffer(slots, dtype=np.int64)
    table = np.frombuffer(held, dtype=np.int32).reshape(len(slot), -1)
    first = np.maximum(slot - (window - 1), 0) // size * size
    candidates = first // size
    # 0: no candidate. 1: as many as are read, or fewer. Then up to twice, four times as many, ...
    kind = (np.frexp((candidates - 1) // topk)[1] + 1) * (candidates > 0)
    groups = []
    for one in np.unique(kind):
        tokens = (kind == one).nonzero()[0]
        limit = candidates[tokens, None]
        column = np.arange(int(limit.max()))
        late = column >= limit
        pages = table[tokens[:, None], np.where(late, 0, column)].astype(np.int64)
        where: slice | Tensor = torch.from_numpy(pages)
        if len(tokens) == 1 and pages.size and bool((np.diff(pages[0]) == 1).all()):
            where = slice(int(pages[0, 0]), int(pages[0, -1]) + 1)
        behind = np.where(late, np.float32(-np.inf), np.float32(0))[:, None] if late.any() else None
        some = None if len(tokens) == len(slot) else torch.from_numpy(tokens)
        sets = np.divmod(np.arange(len(tokens) * heads)[:, None], heads)
        groups.append(_Group(some, pages, where, behind, *sets))
    window_lines = lines.find(heads, size, table, np.arange(len(slot)), first, slot, True)
    return _Place(window_lines, tuple(groups))


def _attend_group(
    query: Query, group: _Group, o_window: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """o, indices and scores of a group's tokens; the window's are those of the whole step."""
    q, lmk_q, topk, task = query.q, query.lmk_q, query.topk, query.task
    if group.tokens is not None:
        q, lmk_q, o_window, lse = (x[group.tokens] for x in (q, lmk_q, o_window, lse))
    (tokens, pages), heads = group.pages.shape, query.k_cache.shape[1]
    window: Floats = lse.numpy().reshape(-1, 1)
    width = min(topk, pages)
    if width == 0:
        share = torch.from_numpy(_shares(window, query.softmax1)).view(tokens, -1, 1)
        return (share * o_window).to(q.dtype), *task.empty(tokens, topk, q.device)
    u = _scores(query, lmk_q, group)
    found = _best(u, window, tokens * heads, task.normalised, width)
    taken = u[np.arange(len(u))[:, None], found.repeat(len(u) // len(found), axis=0)]
    shares = _shares(np.concatenate((taken, window), axis=1), query.softmax1)
    held = torch.from_numpy((group.pages[group.owner, found] * heads + group.head).reshape(-1))
    o_pages = _attend_pages(query, q, held, torch.from_numpy(shares[:, :width]))
    rest = torch.from_numpy(shares[:, width:]).view(tokens, -1, 1)
    out = torch.addcmul(o_pages, rest, o_window).to(q.dtype)
    indices = found.astype(np.int32).reshape(tokens, heads, width)
    if width == pages and group.late is not None:
        indices[np.broadcast_to(group.late < 0, indices.shape)] = -1
    results = torch.from_numpy(indices), torch.from_numpy(taken).view(tokens, -1, width)
    if width == topk:
        return out, *results
    behind = (0, topk - width)
    return (
        out,
        torch.nn.functional.pad(results[0], behind, value=-1),
        torch.nn.functional.pad(results[1], behind, value=-torch.inf),
    )


def _scores(query: Query, lmk_q: Tensor, group: _Group) -> Floats:
    """u [n * h_q, P] of the group's pages, -inf where a token has none."""
    (tokens, pages), task = group.pages.shape, query.task
    z, step = torch.mul(lmk_q.float(), task.scale), max(1, _SUMMARIES // pages)
    if step >= tokens:
        products = _multiply(z, group.where, query.summary_key, task)
    else:
        assert isinstance(group.where, Tensor)
        blocks = zip(z.split(step), group.where.split(step), strict=True)
        products = torch.cat([_multiply(x, at, query.summary_key, task) for x, at in blocks])
    u: Floats = products.view(tokens, -1, pages).numpy()
    if query.summary_bias is not None:
        bias = select_cpu.gather(query.summary_bias, group.where).numpy()
        u += bias.reshape(tokens, pages, -1).swapaxes(1, 2)
    if group.late is not None:
        u += group.late
    return u.reshape(-1, pages)


def _multiply(z: Tensor, where: slice | Tensor, summary_key: Tensor, task: Task) -> Tensor:
    """Queries [m, h_q, d] times the keys [m, P] that they name: [m * h_R, h_q / h_R, P]."""
    taken = select_cpu.gather(summary_key, where)
    if z.shape[0] == 1:
        keys = task.keys(taken.view(1, *taken.shape[-3:]))
    else:
        heads_first = taken.transpose(1, 2)
        keys = scratch("wide lines", heads_first.shape, z.dtype).copy_(heads_first).flatten(0, 1)
    return torch.bmm(z.view(keys.shape[0], -1, z.shape[2]), keys.transpose(1, 2))


def _best(u: Floats, window: Floats, sets: int, normalised: bool, width: int) -> Ints:
    """Places [sets, width] of the best in u [n * h_q, P], ascending; of equal ones the first."""
    pages = u.shape[1]
    if width == pages:
        return np.broadcast_to(np.arange(pages), (sets, pages))
    score = u
    if normalised:
        every = np.concatenate((u, window), axis=1)
        top = every.max(axis=1, keepdims=True)
        score = u - (top + np.log(np.exp(every - top).sum(axis=1, keepdims=True)))
    score = score.reshape(sets, -1, pages).max(axis=1)
    least = np.partition(score, pages - width, axis=1)[:, pages - width, None]
    enough = score >= least
    if (enough.sum(axis=1) != width).any():  # equal ones, or no numbers
        order = np.argsort(-score, axis=1, kind="stable")
        return np.sort(order[:, :width], axis=1)
    places: Ints = enough.nonzero()[1].reshape(sets, width)
    return places


def _shares(logits: Floats, softmax1: bool) -> Floats:
    """Softmax of logits [.., n]; softmax1: beside a zero, whose share is lost. 0 of nothing."""
    limits = np.finfo(np.float32)
    top = np.maximum(logits.max(axis=1, keepdims=True), 0 if softmax1 else limits.min)
    shares: Floats = np.exp(logits - top)
    total = shares.sum(axis=1, keepdims=True)
    shares /= total + np.exp(-top) if softmax1 else np.maximum(total, limits.tiny)
    return shares


def _attend_pages(query: Query, q: Tensor, pages: Tensor, shares: Tensor) -> Tensor:
    """Selected pages' attention states, weighted and added up.

    Args:
        q: [n, h_q, d].
        pages: [n * h_kv * K] int64, in the caches seen as lines [pages * h_kv, S d].
        shares: [n * h_q, K] of each page, 0 where a token has fewer.
    Returns:
        [n, h_q, d] float32.
    """
    _, heads, size, dim = query.k_cache.shape
    tokens, width = q.shape[0], shares.shape[1]
    scaled = torch.mul(q.float(), query.task.scale).view(tokens * heads, -1, dim)
    weights = shares.view(*scaled.shape[:2], width, 1)
    # The last slot of a page is no key: it is not even taken.
    k, v = (x.view(-1, size * dim)[:, :-dim] for x in (query.k_cache, query.v_cache))
    block = paging.tokens_per_block(8 * heads * width * size * dim, tokens)
    if block == tokens:
        return _attend_block(scaled, k, v, pages, weights).view(q.shape)
    step = block * heads
    blocks = zip(scaled.split(step), pages.split(step * width), weights.split(step), strict=True)
    return torch.cat([_attend_block(x, k, v, some, w) for x, some, w in blocks]).view(q.shape)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, weights: Tensor) -> Tensor:
    """`_attend_pages` of scaled float32 q [m, G, d]; k, v [.., (S - 1) d], weights [m, G, K, 1]."""
    sets, group, width, _ = weights.shape
    taken = scratch("lines", (len(pages), k.shape[1]), k.dtype)
    wide = taken if k.dtype == q.dtype else scratch("wide lines", taken.shape, q.dtype)
    shape = (sets, -1, q.shape[2])
    torch.index_select(k, 0, pages, out=taken)
    keys = (taken if wide is taken else wide.copy_(taken)).view(shape)
    logits = scratch("logits", (sets, group, keys.shape[1]), q.dtype)
    torch.bmm(q, keys.transpose(1, 2), out=logits)
    p = scratch("weights", (sets, group, width, keys.shape[1] // width), q.dtype)
    torch.softmax(logits.view(p.shape), dim=-1, out=p)
    p = p.mul_(weights).flatten(2)
    torch.index_select(v, 0, pages, out=taken)
    if wide is taken:
        return torch.bmm(p, taken.view(shape))
    if sets * group < _FEW_QUERIES:
        return torch.bmm(p, wide.copy_(taken).view(shape))
    return torch.bmm(scratch("weights", p.shape, v.dtype).copy_(p), taken.view(shape)).float()
