"""State of penalties by row: tokens of the prompt and counts of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn import ops
from cairn.runner.staging import send
from cairn.runner.step import Ints, RowOpen

REPETITION_RANGE = (1e-30, 1e30)
"""Repetition penalties beyond it choose the same tokens, but logits overflow."""
LEAST = 8
"""Rows of the tables at first; doubled when they are full."""


class Penalties:
    """Of the rows whose parameters ask for them; each has a place in tables.

    Args:
        vocab_size: tokens counted.
        device: where the logits live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._generated = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._numbers: NDArray[np.float32] = np.zeros((3, 0), dtype=np.float32)
        self._place: dict[int, int] = {}
        self._free: list[int] = []

    def open(self, opened: RowOpen) -> None:
        """A row begins, with its history."""
        if not self._free:
            self._grow()
        place = self._place[opened.row] = self._free.pop()
        p = opened.params
        repetition = min(max(p.repetition_penalty, REPETITION_RANGE[0]), REPETITION_RANGE[1])
        self._numbers[:, place] = p.presence_penalty, p.frequency_penalty, repetition
        history = np.array(opened.history, dtype=np.int64)
        prompt, output = np.split(history, [opened.num_prompt])
        seen, again = send((prompt, output), self._device)
        self._in_prompt[place].zero_().index_fill_(0, seen, True)
        ones = torch.ones_like(again, dtype=torch.int32)
        self._generated[place].zero_().index_add_(0, again, ones)

    def close(self, row: int) -> None:
        """The row has ended; one that was not opened here is none of ours."""
        if row in self._place:
            self._free.append(self._place.pop(row))

    def among(self, rows: Sequence[int]) -> list[int]:
        """Indices of the rows that are penalised."""
        return [i for i, row in enumerate(rows) if row in self._place] if self._place else []

    def apply(
        self,
        logits: Tensor,
        rows: Sequence[int],
        at: Sequence[int],
        more: tuple[Ints, Ints] | None = None,
    ) -> None:
        """Penalise lines `at` of logits [n, V] float32, of `rows` [n], in place.

        Args:
            more: indices in `at`, and for each a token that its row has generated beside those that
                were counted.
        """
        places = self._places(rows, at)
        index, place, *numbers = send(
            (np.array(at), places, *self._numbers[:, places]), self._device
        )
        part = logits if len(at) == len(logits) else logits[index]
        generated = self._generated[place]
        if more is not None and len(more[0]):
            line, token = send(more, self._device)
            ones = torch.ones_like(line, dtype=torch.int32)
            generated.index_put_((line, token), ones, accumulate=True)
        ops.apply_penalties(part, self._in_prompt[place], generated, *numbers)
        if part is not logits:
            logits.index_copy_(0, index, part)

    def count(
        self,
        tokens: Tensor,
        rows: Sequence[int],
        at: Sequence[int],
        kept: Tensor | None = None,
    ) -> None:
        """Those `at` of the tokens [n] int64, of `rows` [n], have been generated; -1 is none.

        Args:
            kept: [n] bool, whether they have; None: all.
        """
        index, first = send((np.array(at), self._places(rows, at) * self._vocab_size), self._device)
        counted = first + tokens[index].clamp(min=0)
        ones = torch.ones_like(counted) if kept is None else kept[index]
        ones = ones.to(torch.int32)
        self._generated.view(-1).index_add_(0, counted, ones)

    def _places(self, rows: Sequence[int], at: Sequence[int]) -> Ints:
        return np.array([self._place[rows[i]] for i in at])

    def _grow(self) -> None:
        before = len(self._generated)
        more = max(LEAST, before)
        self._in_prompt = _with_lines(self._in_prompt, more)
        self._generated = _with_lines(self._generated, more)
        self._numbers = np.pad(self._numbers, ((0, 0), (0, more)))
        self._free += range(before + more - 1, before - 1, -1)


def _with_lines(table: Tensor, more: int) -> Tensor:
    return torch.cat((table, table.new_zeros(more, table.shape[1])))
