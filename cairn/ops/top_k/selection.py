"""The definition of the selection that the ops of this family share.

A row's candidates are the positions start .. start + length - 1 of its scores, counted from start.
A larger score is preferred, among equal ones the lower position. NaN counts as -inf, -0 as 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops.checks import expect, refuse

MOST = 4096
"""Largest topk."""
NONE = -1
BEYOND = (1 << 31) - 1
"""Larger than any position."""


class Rows(NamedTuple):
    """Scores and the range of candidates in each row.

    Attributes:
        score: [B, L] float32.
        lengths: [B] int32.
        starts: [B] int32, or None for 0.
        topk: how many positions are selected.
    """

    score: Tensor
    lengths: Tensor
    starts: Tensor | None
    topk: int


def check(name: str, rows: Rows) -> None:
    """Raise BadArgument unless the op of this name takes these rows."""
    expect(name, "score", rows.score, (None, None), (torch.float32,))
    batch = rows.score.shape[:1]
    expect(name, "lengths", rows.lengths, batch, (torch.int32,), like=rows.score)
    if not 1 <= rows.topk <= MOST:
        refuse(name, "topk", f"is {rows.topk}, not 1 to {MOST}")
    if rows.starts is not None:
        expect(name, "row_starts", rows.starts, batch, (torch.int32,), like=rows.score)


def blank(score: Tensor, topk: int) -> Tensor:
    """An empty result, for its shape."""
    return score.new_empty((score.shape[0], topk), dtype=torch.int32)


def select(rows: Rows) -> Tensor:
    """[B, topk] int32 positions, ascending, padded with -1. In rows with at most topk candidates
    all are selected, whatever their scores."""
    score, lengths, starts, topk = rows
    width = score.shape[1]
    start = torch.zeros_like(lengths, dtype=torch.int64) if starts is None else starts.long()
    order = torch.arange(topk, device=score.device)
    whole = torch.where(order < lengths[:, None], order, NONE).to(torch.int32)
    column = torch.arange(width, device=score.device)
    inside = (column >= start[:, None]) & (column < (start + lengths)[:, None])
    key = _ordered(score).masked_fill_(~inside, torch.iinfo(torch.int64).min)
    taken = key.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    place = torch.where(inside.gather(1, taken), taken - start[:, None], BEYOND)
    place = torch.nn.functional.pad(place, (0, topk - place.shape[1]), value=BEYOND)
    place = place.sort(dim=1).values
    chosen = torch.where(place < BEYOND, place, NONE).to(torch.int32)
    return torch.where((lengths > topk)[:, None], chosen, whole)


def select_by_topk(rows: Rows) -> Tensor:
    """`select` by torch.topk, for rows in which every score is a candidate. torch.topk picks any of
    several equal scores: rows where the last selected score has equals that were not selected are
    redone."""
    score, lengths, starts, topk = rows
    width = score.shape[1]
    if starts is not None or width <= topk or bool((lengths != width).any()):
        return select(rows)
    value, place = torch.topk(score, topk, dim=1)
    chosen = place.sort(dim=1).values.to(torch.int32)
    reach = torch.count_nonzero(score >= value[:, -1:], dim=1)
    # torch.topk ranks NaN first; these rows are redone without.
    again = ((reach != topk) | value[:, 0].isnan()).nonzero()[:, 0]
    if len(again):
        some = score[again].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        last = torch.topk(some, topk, dim=1).values[:, -1:]
        taken, equal = some > last, some == last
        room = topk - torch.count_nonzero(taken, dim=1)
        taken |= equal & (equal.cumsum(1, dtype=torch.int32) <= room[:, None])
        chosen[again] = taken.nonzero()[:, 1].view(-1, topk).to(torch.int32)
    return chosen


def _ordered(score: Tensor) -> Tensor:
    """int64 keys in the order in which scores are selected."""
    bits = (score.nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
