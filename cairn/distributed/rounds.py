"""Rounds: forward passes that engines with shared experts run in lockstep."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.distributed.groups import Group
from cairn.errors import EngineDead


class EnginesStopped(EngineDead):
    """An engine that has a part of the experts was told to stop."""


class Rounds:
    """The rounds of engines that share experts: each engine has its own tokens, and all run the
    same collectives in a round.

    Args:
        group: the engines.

    Attributes:
        count: rounds so far.
        rows: largest number of tokens of an engine in this round.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.count, self.rows = group, 0, 0

    def begin(self, tokens: int, stops: bool = False) -> int:
        """Begin a round with `tokens` tokens of this engine; returns `rows`. At 0 no engine has
        tokens, and the round is over.

        Raises:
            EngineDead: another engine is gone.
            EnginesStopped: it was stopped.
        """
        told = torch.tensor([tokens, int(stops)], dtype=torch.int64)
        try:
            every = self.group.gathered(told)
        except RuntimeError as error:
            raise EngineDead(
                f"the other engines cannot be reached ({error})", "Look at their last log lines"
            ) from None
        self.count += 1
        self.rows = int(every[:, 0].max())
        if not stops and bool(every[:, 1].any()):
            raise EnginesStopped("an engine that has a part of the experts was stopped")
        return self.rows

    def gathered(self, x: Tensor, padding: int = 0) -> Tensor:
        """All engines' tokens [engines * rows, ..] of this engine's x [n, ..]."""
        padded = x.new_full((self.rows, *x.shape[1:]), padding)
        padded[: len(x)] = x
        return self.group.gathered(padded).flatten(0, 1)

    def own(self, x: Tensor, count: int) -> Tensor:
        """The sum over engines of x [engines * rows, ..], sliced to this engine's tokens [count,
        ..]."""
        begin = self.group.rank * self.rows
        return self.group.sum(x)[begin : begin + count]
