"""Tensor layouts of select_pages' strategies, and the store of results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STRATEGIES = ("hils", "softmax_head", "head", "group")
NO_PAGE = 2**31 - 1
"""Marks the absence of a page in ascending lists."""


def candidate_pages(slot: Tensor, page_size: int, window: int, strategy: str = "hils") -> Tensor:
    """Number of candidate pages of a slot, >= 0 ([T] int64): pages 0 .. that number - 1.

    Raises ValueError for a window that the strategy does not allow.
    """
    if window < (1 if strategy == "hils" else 0):
        raise ValueError(f"select_pages: {strategy} cannot have a window of {window} slots")
    if strategy == "softmax_head" and window == 0:
        return slot // page_size
    return ((slot - (window - 1)) // page_size).clamp(min=0)


def short_pages(page_size: int, window: int, topk: int) -> int:
    """Pages of the longest row in which every candidate is selected, for windows of at least 1
    slot: with one page more, the last slot has topk + 1 candidates."""
    return topk + -(-window // page_size)


@dataclass(frozen=True)
class Task:
    """Parameters of a strategy.

    Attributes:
        groups: selections per token, h_kv.
        summed: whether the queries of a group are summed before scoring.
        normalised: whether each head's normaliser is subtracted before scores are compared.
        score_heads: number of heads of the scores.
        key_heads: number of heads of the scored keys, after summing.
        scale: scale of the dot products.
    """

    groups: int
    summed: bool
    normalised: bool
    score_heads: int
    key_heads: int
    scale: float

    def empty(self, tokens: int, topk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Result tensors with nothing selected."""
        indices = torch.full((tokens, self.groups, topk), -1, dtype=torch.int32, device=device)
        scores = torch.full(
            (tokens, self.score_heads, topk), -torch.inf, dtype=torch.float32, device=device
        )
        return indices, scores

    def keys(self, summaries: Tensor) -> Tensor:
        """[U, P, h_R, d] -> float32 [U * key_heads, P, d]."""
        count, pages, heads, dim = summaries.shape
        if heads > self.key_heads:
            summaries = summaries.float().unflatten(2, (self.key_heads, -1)).sum(dim=3)
        # One tensor only changes dtype and keeps its layout; several are converted and made
        # contiguous in one pass.
        order = torch.preserve_format if count == 1 else torch.contiguous_format
        keys = summaries.transpose(1, 2).to(torch.float32, memory_format=order)
        return keys.reshape(count * self.key_heads, pages, dim)

    def queries(self, lmk_q: Tensor) -> Tensor:
        """[U, c, h_q, d] -> scaled float32 [U * key_heads, heads per key head * c, d]."""
        count, tokens, _, dim = lmk_q.shape
        queries = lmk_q.float() * self.scale
        if self.summed:
            queries = queries.unflatten(2, (self.groups, -1)).sum(dim=3)
        queries = queries.view(count, tokens, self.key_heads, -1, dim).permute(0, 2, 3, 1, 4)
        return queries.reshape(count * self.key_heads, -1, dim)


def task_of(
    lmk_q: Tensor, summary_key: Tensor, strategy: str, scale: float | None, kv_heads: int | None
) -> Task:
    """The task of a call. Raises ValueError for an unknown strategy."""
    if strategy not in STRATEGIES:
        raise ValueError(f"select_pages: unknown strategy {strategy!r}, not in {STRATEGIES}")
    heads, dim = lmk_q.shape[1:]
    factor = dim**-0.5 if scale is None else scale
    groups = min(heads, kv_heads or summary_key.shape[1])
    if strategy == "group":
        return Task(groups, True, False, groups, groups, factor)
    # With one head per group the normaliser is a constant per selection and does not change it.
    normalised = strategy != "head" and heads > groups
    return Task(groups, False, normalised, heads, summary_key.shape[1], factor)


def store(
    indices: Tensor,
    scores: Tensor,
    at: Tensor | slice,
    found: Tensor,
    u: Tensor,
    task: Task,
) -> None:
    """Write selected pages and their u.

    Args:
        indices, scores: the results, changed.
        at: N tokens; each token at most once, except the last row of the results (padding).
        found: [U, h_kv, c, k] int64 ascending, U * c = N, k <= K, NO_PAGE where there is none.
        u: [U, h, c, P].
    """
    count, groups, tokens, width = found.shape
    none = found == NO_PAGE
    place = found.masked_fill(none, 0).unsqueeze(2)
    u = u.view(count, groups, -1, tokens, u.shape[-1])
    taken = u.gather(-1, place.expand(-1, -1, u.shape[2], -1, -1))
    taken = taken.masked_fill_(none.unsqueeze(2), -torch.inf).permute(0, 3, 1, 2, 4)
    scores[at, :, :width] = taken.reshape(count * tokens, task.score_heads, width)
    found = found.masked_fill(none, -1).to(torch.int32).transpose(1, 2)
    indices[at, :, :width] = found.reshape(count * tokens, groups, width)
