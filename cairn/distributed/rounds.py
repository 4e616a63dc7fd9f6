"""Rounds: forward passes that engines with shared experts run in lockstep."""

from __future__ import annotations

import re
from collections.abc import Callable

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
        every = _with_others(self.group.gathered, told)
        self.count += 1
        self.rows = int(every[:, 0].max())
        if not stops and bool(every[:, 1].any()):
            raise EnginesStopped("an engine that has a part of the experts was stopped")
        return self.rows

    def gathered(self, x: Tensor, padding: int = 0) -> Tensor:
        """All engines' tokens [engines * rows, ..] of this engine's x [n, ..]."""
        padded = x.new_full((self.rows, *x.shape[1:]), padding)
        padded[: len(x)] = x
        return _with_others(self.group.gathered, padded).flatten(0, 1)

    def own(self, x: Tensor, count: int) -> Tensor:
        """The sum over engines of x [engines * rows, ..], sliced to this engine's tokens [count,
        ..]."""
        begin = self.group.rank * self.rows
        return _with_others(self.group.sum, x)[begin : begin + count]


def _with_others(collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A collective of all engines. Raises EngineDead where another one is gone."""
    try:
        return collective(x)
    except RuntimeError as error:
        # Gloo's text is a place in its source, the reason, and advice for its users.
        reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", str(error))
        raise EngineDead(
            f"the other replicas, which share the experts, cannot be reached ({reason})",
            "Look at their last log lines",
        ) from error
