"""Sequences concatenated in one tensor: their starts, and checks of these."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from cairn.ops.checks import INDICES, expect, on_host, refuse


def expect_starts(op: str, name: str, starts: Tensor, tokens: int, like: Tensor) -> None:
    """Raise BadArgument unless starts are [N + 1] int32 or int64 and, on the host, ascend from 0 to
    `tokens` at most."""
    expect(op, name, starts, 1, INDICES, like)
    if not starts.shape[0]:
        refuse(op, name, "has no entry: it holds the start of every sequence and the end of all")
    if not on_host(starts):
        return
    found = starts.tolist()
    if found[0] != 0 or sorted(found) != found or found[-1] > tokens:
        refuse(op, name, f"is {found}: it must ascend from 0 to {tokens} at most")


def spans(starts: Tensor | None, batch: int, tokens: int) -> list[range]:
    """Token ranges of the sequences: between `starts`, or `batch` sequences of `tokens` each."""
    bounds = [row * tokens for row in range(batch + 1)] if starts is None else starts.tolist()
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


def regular(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Starts [batch + 1] of sequences of equal length."""
    return torch.arange(batch + 1, device=device) * tokens
