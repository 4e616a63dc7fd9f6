"""Log-probabilities of tokens and of the most likely alternatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.runner.staging import Arriving, send
from cairn.types import Alternatives, LogprobColumns

BLOCK_BYTES = 128 << 20
"""Most bytes (float32) of logits that are processed at once."""
MIN_CHOSEN, MAX_CHOSEN = 32, 4096
"""Lower bound of the number of alternatives that are selected, because kernels are compiled per
number; above the upper bound the whole vocabulary is sorted."""
MAX_GRAPH_LOGPROBS = MIN_CHOSEN
"""Alternatives per token that a graph reports."""


def block_rows(vocab_size: int) -> int:
    """Rows of logits per block."""
    return max(1, BLOCK_BYTES // (4 * vocab_size))


class _Part(NamedTuple):
    """Log-probabilities of tokens that want the same number of alternatives.

    Attributes:
        at: their indices among all tokens.
        columns: function that waits for the result.
    """

    at: Sequence[int]
    columns: Callable[[], LogprobColumns]


class Reported:
    """Log-probabilities of some tokens, being copied to the host."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> Self:
        """Compute them on the device.

        Args:
            logits: [n, V] float32.
            tokens: [n] int64, sampled tokens; for -1 (none) anything may be reported.
            wanted: [n], number of most likely alternatives to report for each; -1: all.
        """
        parts: list[_Part] = []
        rows, vocab_size = logits.shape
        most, taken = block_rows(vocab_size), tokens.clamp(min=0)
        for count, alike in _alike(wanted):
            number = vocab_size if count < 0 else min(count, vocab_size)
            for begin in range(0, len(alike), most):
                at = alike[begin : begin + most]
                if len(at) == rows:
                    lines, ids = logits, taken
                else:
                    (index,) = send((np.array(at),), logits.device)
                    lines, ids = logits[index], taken[index]
                arriving = Arriving(*_most_likely(lines, ids, number))
                parts.append(_Part(at, functools.partial(_whole, arriving)))
        return cls(parts)

    @classmethod
    def of_lines(cls, lines: Tensor, rows: Sequence[int], wanted: Sequence[int]) -> Self:
        """Take them from rows of a step's `lines_of`.

        Args:
            lines: [T, 2 (k + 1) + 1] int32, of all rows of the step; later work may overwrite it.
            rows: [n], the rows to report.
            wanted: [n], number of alternatives, at most k.
        """
        arriving = Arriving(lines)
        return cls(
            [
                _Part(at, functools.partial(_cut, arriving, [rows[i] for i in at], count))
                for count, at in _alike(wanted)
            ]
        )

    def entries(self) -> list[Alternatives]:
        """One entry per token; waits for the copy."""
        if len(self._parts) == 1:
            [columns] = self.columns()
            return list(columns.positions())
        found: dict[int, Alternatives] = {}
        for part, columns in zip(self._parts, self.columns(), strict=True):
            found |= zip(part.at, columns.positions(), strict=True)
        return [found[i] for i in sorted(found)]

    def columns(self) -> list[LogprobColumns]:
        """All entries as arrays, if all want the same number of alternatives; waits for the
        copy."""
        return [part.columns() for part in self._parts]


def _alike(wanted: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Each wanted number of alternatives, and the indices of the tokens that want it."""
    for count in sorted(set(wanted)):
        yield count, [i for i, other in enumerate(wanted) if other == count]


def _whole(arriving: Arriving) -> LogprobColumns:
    return LogprobColumns(*arriving.arrays())


def _cut(arriving: Arriving, rows: Sequence[int], count: int) -> LogprobColumns:
    """Columns of `lines_of`: the first `count` alternatives, and the chosen token."""
    (lines,) = arriving.arrays()
    most = lines.shape[1] // 2 - 1
    places, chosen = np.array([*range(count), most]), lines[rows]
    values = np.ascontiguousarray(chosen[:, most + 1 + places]).view(np.float32)
    return LogprobColumns(chosen[:, places], values, chosen[:, -1])


def lines_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of tokens in one tensor, without host synchronisation, for CUDA graphs.

    Args:
        logits: [n, V] float32.
        tokens: [n] int64, sampled tokens, as in `Reported.of`.

    Returns:
        [n, 2 (k + 1) + 1] int32, k = min(MAX_GRAPH_LOGPROBS, V): ids of the k most likely tokens
        and of the sampled one, as many log-probabilities, float32 by their bits, and the rank of
        the sampled one.
    """
    ids, values, ranks = _most_likely(logits, tokens.clamp(min=0), MAX_GRAPH_LOGPROBS)
    return torch.cat((ids.int(), values.view(torch.int32), ranks.int()[:, None]), 1)


def _most_likely(logits: Tensor, taken: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [n, count + 1] int64 and log-probabilities [n, count + 1] of the most likely tokens and
    of the sampled ones `taken` [n], and the ranks of these [n] int64."""
    peak, log_sum, rank = ops.score_tokens(logits, taken)
    ids = torch.cat((largest(logits, count), taken[:, None]), 1)
    return ids, logits.gather(1, ids) - peak[:, None] - log_sum[:, None], rank


def largest(values: Tensor, count: int) -> Tensor:
    """Indices [n, count] int64 of the `count` largest values in each row of values [n, V] float32,
    in descending order; ties go to the lower index."""
    if not count:
        return values.new_empty((len(values), 0), dtype=torch.int64)
    if count > MAX_CHOSEN:
        return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count]
    lengths = torch.full((len(values),), values.shape[1], dtype=torch.int32, device=values.device)
    chosen = min(max(count, MIN_CHOSEN), values.shape[1])
    ids = ops.fast_topk_v2(values, lengths, chosen).to(torch.int64)
    order = torch.sort(values.gather(1, ids), dim=1, descending=True, stable=True).indices
    return ids.gather(1, order[:, :count])
