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
"""Lines of the vocabulary are looked through in blocks of at most so many bytes of float32."""
LEAST_CHOSEN, MOST_CHOSEN = 32, 4096
"""At least so many are looked for: kernels are compiled for how many. More than the most are sorted
out of all."""
MOST_OF_GRAPHS = LEAST_CHOSEN
"""Alternatives that a graph reports of each token."""


def block_rows(vocab_size: int) -> int:
    """Lines of a block."""
    return max(1, BLOCK_BYTES // (4 * vocab_size))


class _Part(NamedTuple):
    """What is reported of some tokens that want the same.

    Attributes:
        at: their places among all.
        columns: waits for it.
    """

    at: Sequence[int]
    columns: Callable[[], LogprobColumns]


class Reported:
    """What is reported of some tokens, on its way to the host."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> Self:
        """Put it together on the device.

        Args:
            logits: [n, V] float32.
            tokens: [n] int64, those taken; -1 where there is none, of which any may be reported.
            wanted: [n], how many of the most likely ones are reported beside each; -1: all.
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
        """Of some rows of `lines_of` a step.

        Args:
            lines: [T, 2 (k + 1) + 1] int32, of all its rows; may be overwritten by what is queued
                later.
            rows: [n], those of which something is reported.
            wanted: [n], how many of the most likely ones, at most k.
        """
        arriving = Arriving(lines)
        return cls(
            [
                _Part(at, functools.partial(_cut, arriving, [rows[i] for i in at], count))
                for count, at in _alike(wanted)
            ]
        )

    def entries(self) -> list[Alternatives]:
        """One for each of the tokens; waits for them."""
        if len(self._parts) == 1:
            [columns] = self.columns()
            return list(columns.positions())
        found: dict[int, Alternatives] = {}
        for part, columns in zip(self._parts, self.columns(), strict=True):
            found |= zip(part.at, columns.positions(), strict=True)
        return [found[i] for i in sorted(found)]

    def columns(self) -> list[LogprobColumns]:
        """The same side by side, where all want the same; waits for them."""
        return [part.columns() for part in self._parts]


def _alike(wanted: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Each number that is wanted, and where it is."""
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
        tokens: [n] int64, those taken, as in `Reported.of`.

    Returns:
        [n, 2 (k + 1) + 1] int32, k = min(MOST_OF_GRAPHS, V): ids of the k most likely tokens and of
        the one taken, as many log-probabilities, float32 by their bits, and the rank of the one
        taken.
    """
    ids, values, ranks = _most_likely(logits, tokens.clamp(min=0), MOST_OF_GRAPHS)
    return torch.cat((ids.int(), values.view(torch.int32), ranks.int()[:, None]), 1)


def _most_likely(logits: Tensor, taken: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [n, count + 1] int64 and log-probabilities [n, count + 1] of the most likely tokens and
    of those taken [n], and the ranks of these [n] int64."""
    peak, log_sum, rank = ops.score_tokens(logits, taken)
    ids = torch.cat((largest(logits, count), taken[:, None]), 1)
    return ids, logits.gather(1, ids) - peak[:, None] - log_sum[:, None], rank


def largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each line of values [n, V] float32 are, the largest first; of
    equals those in front: [n, count] int64."""
    if not count:
        return values.new_empty((len(values), 0), dtype=torch.int64)
    if count > MOST_CHOSEN:
        return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count]
    lengths = torch.full((len(values),), values.shape[1], dtype=torch.int32, device=values.device)
    chosen = min(max(count, LEAST_CHOSEN), values.shape[1])
    ids = ops.fast_topk_v2(values, lengths, chosen).to(torch.int64)
    order = torch.sort(values.gather(1, ids), dim=1, descending=True, stable=True).indices
    return ids.gather(1, order[:, :count])
