"""Rows that run guesses of their next tokens: which of them were right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cairn.runner.staging import Arriving, Trip, send
from cairn.runner.step import DecodeWork, Ints, StepPlan

V = TypeVar("V")

NO_AHEAD: Ints = np.zeros(0, dtype=np.int64)
NO_GUESS = -2
"""Where no guess follows a choice: no token is equal to it."""


class Entries(NamedTuple):
    """A step whose rows run their last tokens, and guesses, token by token.

    Attributes:
        work: the tokens, those of a row one behind the other.
        given: [n], what they are, as `ops.decode_slots` takes it; None: each row runs its last one
            alone.
        ahead: [n], guesses that a draft layer should make behind each one's row; empty: none.
    """

    work: DecodeWork
    given: Ints | None
    ahead: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> Entries | None:
        """Those of a plan; None where a row runs others."""
        if not plan.work:
            return cls(plan.decode, None, NO_AHEAD)
        works = plan.work
        if not all(work.sample and work.decodes for work in works):
            return None
        row, first, number, _ = plan.decode
        given = [-1] * len(row)
        for work in works:
            assert work.tokens is not None
            given += [-2 - work.tokens[0], *work.guesses]
        counts = [work.choices for work in works]
        behind = np.concatenate([np.arange(count) for count in counts])
        columns = (
            [w.row for w in works],
            [w.first for w in works],
            [w.output_index for w in works],
        )
        own, begin, index = (np.repeat(column, counts) for column in columns)
        entries = DecodeWork(
            np.concatenate((row, own)),
            np.concatenate((first, begin + behind)),
            np.concatenate((number, index + behind)),
        )
        ahead = np.repeat([work.ahead for work in works], counts)
        none = np.zeros(len(row), dtype=np.int64)
        return cls(entries, np.array(given, dtype=np.int64), np.concatenate((none, ahead)))


class Guessed(NamedTuple):
    """What a draft layer guesses behind a step.

    Attributes:
        arriving: [n, most] of the rows that choose, or in a graph of all choices, on its way.
        ahead: [n], how many of each row's were wanted.
        others: columns at the end with the likeliest first guesses.
    """

    arriving: Arriving | Trip
    ahead: Ints
    others: int = 0

    def first(self) -> list[list[int]] | None:
        """Wait for the likeliest first guesses of each row; None: nobody asked."""
        if not self.others or not isinstance(self.arriving, Arriving):
            return None
        (found,) = self.arriving.arrays()
        lines: list[list[int]] = found[:, -self.others :].tolist()
        return [line if n else [] for line, n in zip(lines, self.ahead.tolist(), strict=True)]

    def rows(self, counts: Sequence[int] | None, drafts: Drafts | None) -> list[list[int]]:
        """Wait for them; by row.

        Args:
            counts: of each row's choices that count; None: it has one.
            drafts: the guesses of the step; None: it ran none.
        """
        wanted = self.ahead.tolist()
        if isinstance(self.arriving, Arriving):
            (found,) = self.arriving.arrays()
            lines = found.tolist()
        else:
            lines = self.arriving.guesses()
            if drafts is not None and counts is not None:
                ends = drafts.begin + np.array(counts) - 1
                lines = [lines[i] for i in ends.tolist()]
        return [line[:n] for line, n in zip(lines, wanted, strict=True)]


class Drafts(NamedTuple):
    """The guesses of a step that has any.

    Attributes:
        guess: [n], the guess in the place of each choice, or NO_GUESS.
        run: [n], number of the row (in the order of choices) that makes each choice.
        begin: [R], index of each row's first choice.
    """

    guess: Ints
    run: Ints
    begin: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> Drafts | None:
        """Those of a plan; None where no row has any."""
        works = [work for work in plan.work if work.sample]
        if not any(work.drafts for work in works):
            return None
        sizes = [1] * len(plan.decode.row) + [work.choices for work in works]
        guess = [NO_GUESS] * len(plan.decode.row)
        for work in works:
            guess += [*work.guesses, NO_GUESS]
        counts = np.array(sizes, dtype=np.int64)
        begin = counts.cumsum() - counts
        run = np.arange(len(sizes)).repeat(counts)
        return cls(np.array(guess, dtype=np.int64), run, begin)

    def before(self, choices: Sequence[int]) -> tuple[Ints, Ints]:
        """Which of some choices [N] have which guesses in front of them [N]: what they build on."""
        begin = self.begin[self.run[list(choices)]].tolist()
        pairs = [
            (number, guess)
            for number, (first, choice) in enumerate(zip(begin, choices, strict=True))
            for guess in self.guess[first:choice].tolist()
        ]
        found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def accept(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the choices [n] int64 with the guesses, on their device.

        Returns:
            Indices of each row's last choice that counts [R], and how many of its choices do [R].
        """
        guess, run, begin = send((self.guess, self.run, self.begin), chosen.device)
        index = torch.arange(len(chosen), dtype=torch.int64, device=chosen.device)
        # A token counts if all guesses before it were right; the token that replaces the first
        # wrong guess is the last that counts.
        wrong = torch.where(chosen == guess, len(chosen), index)
        last = torch.full_like(begin, len(chosen)).scatter_reduce(0, run, wrong, "amin")
        return last, last - begin + 1

    def counted(self, last: Tensor) -> Tensor:
        """Whether each choice counts [n] bool, from the rows' last ones that do [R]."""
        (run,) = send((self.run,), last.device)
        return torch.arange(len(run), dtype=torch.int64, device=last.device) <= last[run]

    def counts(self, chosen: Sequence[int]) -> list[int]:
        """How many of each row's choices count [R]: the same, on the host."""
        tokens = np.array(chosen, dtype=np.int64)
        wrong = np.where(tokens == self.guess, len(tokens), np.arange(len(tokens)))
        last = np.minimum.reduceat(wrong, self.begin)
        return list((last - self.begin + 1).tolist())

    def among(self, rows: Sequence[int], counts: Sequence[int]) -> tuple[Drafts, list[int]]:
        """Of some of its rows, by their numbers, in this order, and how many choices count."""
        return self._replace(begin=self.begin[list(rows)]), [counts[row] for row in rows]

    def kept(self, chosen: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The choices that count, in order."""
        return [
            token
            for begin, count in zip(self.begin.tolist(), counts, strict=True)
            for token in chosen[begin : begin + count]
        ]

    def renumbered(self, by_choice: Mapping[int, V], counts: Sequence[int]) -> dict[int, V]:
        """What is known by the index of a choice, by its index among those that count."""
        kept = self.kept(range(len(self.guess)), counts)
        return {i: by_choice[index] for i, index in enumerate(kept) if index in by_choice}
