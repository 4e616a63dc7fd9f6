"""Log-probabilities of a prompt's tokens, a block of logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor

from cairn.runner.logprobs import Reported, block_rows
from cairn.runner.staging import send
from cairn.runner.step import Ints, PromptReport, RowWork


class PromptScores(NamedTuple):
    """Prompt log-probabilities of one prefill, computed in blocks."""

    work: RowWork
    blocks: tuple[Reported, ...]

    @classmethod
    def of(
        cls,
        logits_of: Callable[[Tensor], Tensor],
        hidden: Tensor,
        work: RowWork,
        index: Ints,
        wanted: int,
        vocab_size: int,
    ) -> Self:
        """Launch their computation.

        Args:
            logits_of: [n, hidden] -> [n, V] float32.
            hidden: [T, hidden] of a step.
            work: the work with the targets.
            index: indices of the slots before the targets.
            wanted: number of alternatives reported per token; -1: all.
            vocab_size: V.
        """
        targets = np.array(work.prompt_targets, dtype=np.int64)
        size = block_rows(vocab_size)
        blocks = []
        for at in range(0, len(index), size):
            part = slice(at, at + size)
            rows, tokens = send((index[part], targets[part]), hidden.device)
            logits = logits_of(hidden[rows])
            blocks.append(Reported.of(logits, tokens, [wanted] * len(tokens)))
        return cls(work, tuple(blocks))

    def logprobs(self) -> PromptReport:
        """Wait for the log-probabilities."""
        parts = tuple(part for block in self.blocks for part in block.columns())
        return PromptReport(self.work.row, self.work.first + 1, parts)
