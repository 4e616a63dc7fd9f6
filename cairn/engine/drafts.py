"""Draft tokens: guesses of a row's next tokens, which the next step runs along with its last
token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.engine.budget import Load
from cairn.engine.pace import Pace
from cairn.engine.request import Lockstep, Request

Ints = NDArray[np.int64]

BLOCK, GROWTH = 1024, 16
"""Prompt lookup first searches the last BLOCK tokens of a text; until it finds the longest match,
it extends the searched range by a factor of GROWTH."""


class Drafter(Protocol):
    """Drafts next tokens. A wrong draft costs time but never changes the output."""

    @property
    def drafts(self) -> int:
        """Most guesses at a time."""

    @property
    def ahead(self) -> int:
        """Guesses that each step computes for the next one; 0: guesses depend on tokens only."""

    def guess(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow those that the request has so far."""


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """Prompt lookup: what followed the newest earlier occurrence of the last tokens.

    Attributes:
        drafts: guesses at a time.
        shortest, longest: last tokens that are looked for; the longest match wins, and among those
            the newest.
    """

    drafts: int
    shortest: int
    longest: int
    ahead: ClassVar[int] = 0

    def guess(self, request: Request, most: int) -> list[int]:
        """See `find`."""
        return self.find(request.tokens, most)

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guesses of what follows tokens; empty without a match. A guess that reaches the end of
        the tokens continues from its own start."""
        found = self.find_all(tokens, most, 1)
        return found[0] if found else []

    def others(self, request: Request, guesses: Sequence[int], count: int) -> list[list[int]]:
        """See `Brancher`: what followed other occurrences, older ones or shorter matches."""
        found = self.find_all(request.tokens, len(guesses), count + 1)
        return [other for other in found if other[0] != guesses[0]][:count]

    def find_all(self, tokens: Sequence[int], most: int, count: int) -> list[list[int]]:
        """Up to `count` guesses, no two with the same first token, the best first."""
        known = np.asarray(tokens, dtype=np.int32)
        if len(known) <= self.shortest:
            return []
        matches = self._matches(known, count)
        if not matches:
            return []
        ends, lengths = (np.concatenate(parts) for parts in zip(*matches, strict=True))
        order, first = np.argsort(-lengths, kind="stable"), [0]
        if count > 1:
            # Only the first match for each following token is kept.
            first = sorted(np.unique(known[ends[order] + 1], return_index=True)[1].tolist())
        behind = ends[order[first[:count]]] + 1
        found = [known[begin : begin + most].tolist() for begin in behind.tolist()]
        return [(tokens * -(-most // len(tokens)))[:most] for tokens in found]

    def _matches(self, known: NDArray[np.int32], count: int) -> list[tuple[Ints, Ints]]:
        """End positions of earlier occurrences of the last tokens, the newest first, and the length
        of each match; older ones are left out where they cannot be among the best `count`."""
        matches, behind, block = [], len(known) - 1, BLOCK
        full = min(self.longest, behind)
        backs = np.arange(self.shortest, full)
        while behind > 0:
            begin = max(0, behind - block)
            ends = begin + np.flatnonzero(known[begin:behind] == known[-1])[::-1]
            for back in range(1, self.shortest):
                ends = ends[ends >= back]
                ends = ends[known[ends - back] == known[-1 - back]]
            if len(ends):
                at = ends[:, None] - backs
                same = (known[at] == known[-1 - backs]) & (at >= 0)
                shared = self.shortest + np.logical_and.accumulate(same, axis=1).sum(axis=1)
                matches.append((ends, shared))
                if len(set(known[ends[shared == full] + 1].tolist())) >= count:
                    break
            behind, block = begin, GROWTH * block
        return matches


@dataclass(frozen=True, slots=True)
class HeadDrafter:
    """The model's own draft layer (multi-token prediction), which guesses after each step.

    Attributes:
        drafts: guesses at a time.
    """

    drafts: int

    @property
    def ahead(self) -> int:
        """All of them."""
        return self.drafts

    def guess(self, request: Request, most: int) -> Sequence[int]:
        """The guesses that the request's last step returned."""
        return request.guesses[:most]

    def others(self, request: Request, guesses: Sequence[int], count: int) -> list[list[int]]:
        """See `Brancher`: other first guesses, of one token each."""
        return [[token] for token in request.others if token != guesses[0]][:count]


@dataclass(slots=True)
class DraftTotals:
    """Counters of speculative decoding since the engine started.

    Attributes:
        runs: number of times that a row ran guesses.
        drafted: guesses that ran.
        accepted: those of them that were right.
    """

    runs: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count one row's guesses of a step."""
        self.runs += 1
        self.drafted += drafted
        self.accepted += accepted


@dataclass(frozen=True, slots=True)
class Guesses:
    """The tokens that decoding rows run, with their guesses.

    Attributes:
        of: request -> its last token and its guesses; without guesses where this step computes the
            first ones, or where the device does not have the last token.
        waiting: requests that will have guesses once the step in flight has finished; no step
            should be planned for them before that.
    """

    of: dict[Request, list[int]]
    waiting: frozenset[Request]

    @classmethod
    def by(
        cls,
        drafter: Drafter,
        rows: Lockstep,
        budget: int,
        border: int | None = None,
        pace: Pace | None = None,
    ) -> Guesses:
        """What the drafter guesses.

        Args:
            rows: that decode.
            budget: tokens that the step may run.
            border: guesses do not cross multiples of this number of tokens, because a state
                snapshot is taken exactly there. None: no such borders.
            pace: decides where guesses pay; None: all run.
        """
        load = Load(rows=len(rows.requests), rows_context=rows.context)
        room = (budget - load.rows) // max(1, load.rows)
        found = {}
        asked = rows.requests
        for request in asked if pace is None else pace.candidates(asked, load):
            # The last token of max_tokens is not run, so no draft follows it.
            left = request.num_prompt + request.max_output - request.planned - 2
            most = min(room, left, drafter.drafts)
            if border is not None:
                most = min(most, border - 2 - request.planned % border)
            if most < 1 and not (drafter.ahead and left > 0):
                continue
            choosing = request.choosing
            guesses = list(drafter.guess(request, max(0, most) + choosing))[choosing:]
            if guesses or drafter.ahead:
                found[request] = guesses
        if found and pace is not None and not pace.pays(found, load):
            found = {}
        for request in rows.requests:
            if request.stale:
                found.setdefault(request, [])
        if drafter.ahead:
            for request in rows.requests:
                if request not in found:
                    # The row continues without its guesses.
                    request.guesses = ()
        waiting = frozenset(request for request in found if request.choosing)
        ready = (r for r in found if r not in waiting)
        return cls({r: [r.tokens[r.planned], *found[r]] for r in ready}, waiting)

    def __contains__(self, request: object) -> bool:
        return request in self.of or request in self.waiting

    def __bool__(self) -> bool:
        return bool(self.of or self.waiting)
