"""Verification of drafted tokens: which of a step's guesses equal the tokens that it sampled."""

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
"""Marks that no guess follows a sampled token; differs from every token id."""


class Entries(NamedTuple):
    """A decode step with guesses as single tokens: each row has one entry for its last token and
    one for every guess.

    Attributes:
        work: the entries, those of a row one after the other.
        given: [n], their tokens as `ops.decode_slots` takes them; None: no row has guesses.
        ahead: [n], how many tokens the draft layer should draft for the entry's row; empty: none.
    """

    work: DecodeWork
    given: Ints | None
    ahead: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> Entries | None:
        """Entries of a plan; None if a row runs other tokens, as those of a prompt."""
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
    """Tokens that the draft layer drafted after a step, on their way to the host.

    Attributes:
        arriving: [n, most], of each row that sampled, or of every entry of a graph.
        ahead: [n], how many were wanted for each row.
        others: columns at the end that hold the most likely first drafts.
    """

    arriving: Arriving | Trip
    ahead: Ints
    others: int = 0

    def first(self) -> list[list[int]] | None:
        """Wait for the most likely first drafts of each row; None if they were not requested."""
        if not self.others or not isinstance(self.arriving, Arriving):
            return None
        (found,) = self.arriving.arrays()
        lines: list[list[int]] = found[:, -self.others :].tolist()
        return [line if n else [] for line, n in zip(lines, self.ahead.tolist(), strict=True)]

    def rows(self, counts: Sequence[int] | None, drafts: Drafts | None) -> list[list[int]]:
        """Wait for the drafts of each row.

        Args:
            counts: accepted tokens of each row; None: one each.
            drafts: the guesses that the step verified; None: it had none.
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
    """The guesses that a step verifies. Every entry samples a token (a choice).

    Attributes:
        guess: [n], the guess that each choice is compared with, or NO_GUESS.
        run: [n], number of the row that makes each choice.
        begin: [R], index of each row's first choice.
    """

    guess: Ints
    run: Ints
    begin: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> Drafts | None:
        """Guesses of a plan; None if no row has any."""
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
        """The guesses that choices were sampled after: pairs (index into `choices`, guess)."""
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
        # A choice counts if all guesses before it were right: the last that counts is the one that
        # differs from its guess first.
        wrong = torch.where(chosen == guess, len(chosen), index)
        last = torch.full_like(begin, len(chosen)).scatter_reduce(0, run, wrong, "amin")
        return last, last - begin + 1

    def counted(self, last: Tensor) -> Tensor:
        """Whether each choice counts [n] bool, given the last one of each row that does [R]."""
        (run,) = send((self.run,), last.device)
        return torch.arange(len(run), dtype=torch.int64, device=last.device) <= last[run]

    def counts(self, chosen: Sequence[int]) -> list[int]:
        """How many of each row's choices count [R], as `accept` says, on the host."""
        tokens = np.array(chosen, dtype=np.int64)
        wrong = np.where(tokens == self.guess, len(tokens), np.arange(len(tokens)))
        last = np.minimum.reduceat(wrong, self.begin)
        return list((last - self.begin + 1).tolist())

    def among(self, rows: Sequence[int], counts: Sequence[int]) -> tuple[Drafts, list[int]]:
        """The guesses of some rows, in this order, and how many choices of each count."""
        return self._replace(begin=self.begin[list(rows)]), [counts[row] for row in rows]

    def kept(self, chosen: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The choices that count, in order."""
        return [
            token
            for begin, count in zip(self.begin.tolist(), counts, strict=True)
            for token in chosen[begin : begin + count]
        ]

    def renumbered(self, by_choice: Mapping[int, V], counts: Sequence[int]) -> dict[int, V]:
        """Values by index of a choice -> values by its index among the choices that count."""
        kept = self.kept(range(len(self.guess)), counts)
        return {i: by_choice[index] for i, index in enumerate(kept) if index in by_choice}
