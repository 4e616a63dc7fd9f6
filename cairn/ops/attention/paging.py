"""Gathering of pages, and attention over a gathered span; shared by the attention ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.attention.tuning import TUNING
from cairn.ops.cache import quantized


def gather_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """Gather pages into contiguous rows.

    Args:
        cache: [pages, h_kv, S, d], or quantized.
        pages: [N, n] int64, physical ids.
    Returns:
        [N, h_kv, n * S, d], new memory, contiguous; float32 of a quantized cache.
    """
    _, heads, size, dim = cache.shape
    count, width = pages.shape
    if quantized.is_quantized(cache):
        taken = quantized.take(cache, pages)
        return taken.transpose(1, 2).reshape(count, heads, width * size, taken.shape[-1])
    if not cache.is_contiguous():
        # Indexing keeps the cache's stride order: make the copy contiguous.
        taken = cache[pages].transpose(1, 2).contiguous()
        return taken.view(count, heads, width * size, dim)
    lines = (pages * heads).unsqueeze(1)
    if heads > 1:
        lines = lines + torch.arange(heads, device=pages.device).unsqueeze(1)
    # index_select copies whole rows; indexing with a tensor copies element by element.
    taken = cache.view(-1, size * dim).index_select(0, lines.reshape(-1))
    return taken.view(count, heads, width * size, dim)


def is_landmark(slot: Tensor, page_size: int) -> Tensor:
    """Whether a slot is the last of its page (bool, the shape of `slot`)."""
    return slot % page_size == page_size - 1


def clear(values: Tensor, hidden: Tensor) -> None:
    """Set the rows of values [n, h, L, d] (contiguous) to 0 where hidden [n, L], even if they are
    NaN."""
    if values.is_cuda:
        values.masked_fill_(hidden[:, None, :, None], 0)
        return
    # Few lines are hidden: on a CPU, filling these by index is much faster than a masked fill of
    # all.
    count, heads, length, dim = values.shape
    lines = hidden.unsqueeze(1).expand(count, heads, length).reshape(-1).nonzero()[:, 0]
    values.view(-1, dim).index_fill_(0, lines, 0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every token over its own gathered keys, in float32.

    Args:
        q: [n, h_q, d].
        k, v: [n, h_kv, L, d]; v is overwritten where hidden.
        hidden: [n, L] bool: masked keys, which may hold arbitrary values.
        scale: softmax scale; None: d ** -0.5.
    Returns:
        (o [n, h_q, d], lse [n, h_q]) float32; with every key hidden o = 0 and lse = -inf.
    """
    count, heads, length, dim = k.shape
    lines, group = count * heads, q.shape[1] // heads
    query = q.float() * (dim**-0.5 if scale is None else scale)
    keys = k.view(lines, length, dim).float()
    scores = torch.bmm(query.reshape(lines, group, dim), keys.transpose(1, 2))
    scores.view(count, heads * group, length).masked_fill_(hidden.unsqueeze(1), -torch.inf)
    clear(v, hidden)
    o, lse = weigh(scores, v.view(lines, length, dim))
    return o.view(q.shape), lse.view(q.shape[:2])


def weigh(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of scores [N, G, L] float32 (overwritten) over values v [N, L, d].

    Returns (o [N, G, d], lse [N, G, 1]) float32; where every score is -inf, o = 0 and lse = -inf.
    """
    # With the clamps, a row of -inf alone has weights exp(-inf) = 0 and an output of 0 / tiny = 0.
    limits = torch.finfo(torch.float32)
    top = scores.amax(dim=-1, keepdim=True).clamp_(min=limits.min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    o = torch.bmm(weights, v.float()).div_(total.clamp(min=limits.tiny))
    return o, top.add_(total.log_())


def attend_span(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    first: Tensor | None,
    slot: Tensor,
    page_table: Tensor,
    page: Tensor,
    width: int,
    scale: float | None,
    mask_landmarks: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of every token over slots first .. slot, restricted to a span of `width` pages.

    Args:
        q: [n, h_q, d]; k_cache, v_cache: [pages, h_kv, S, d]; row, slot: [n] int64.
        first: [n] int64, first visible slot; None: no bound.
        page_table: [rows, max_pages] int32.
        page: [n] or [1] int64, the logical page (>= 0) at which the span starts.
        width: pages in the span.
        scale: None: d ** -0.5.
        mask_landmarks: hide the last slot of every page.
    Returns:
        (o [n, h_q, d], lse [n, h_q]) float32.
    """
    size = k_cache.shape[2]
    logical = page.unsqueeze(1) + torch.arange(width, device=slot.device)
    pages = page_table[row.unsqueeze(1), logical.clamp(max=page_table.shape[1] - 1)].long()
    key = (page * size).unsqueeze(1) + torch.arange(width * size, device=slot.device)
    hidden = key > slot.unsqueeze(1)
    if first is not None:
        hidden |= key < first.unsqueeze(1)
    if mask_landmarks:
        hidden[:, size - 1 :: size] = True
    return attend(q, gather_pages(k_cache, pages), gather_pages(v_cache, pages), hidden, scale)


def tokens_per_block(bytes_per_token: int, tokens: int) -> int:
    """Number of tokens whose memory fits into the budget: at most `tokens`, at least 1."""
    return max(1, min(tokens, TUNING.paging_block_bytes // max(bytes_per_token, 1)))
