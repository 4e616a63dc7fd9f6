"""Branches beside a row's guesses: other continuations of its tokens, which the same step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cairn.cache.landmarks import SlotMap
from cairn.engine.request import Request


class Brancher(Protocol):
    """Knows other continuations."""

    def others(self, request: Request, guesses: Sequence[int], count: int) -> list[list[int]]:
        """Up to `count` of them, no longer than the guesses. Their first tokens differ from each
        other and from the guesses'."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Chooses the branches of a row. Together with its guesses they are a tree that parts behind
    the row's last token; each branch stands in a page of its own, a copy of the row's last one.

    Attributes:
        brancher: knows other continuations.
        width: guesses side by side, those of the row among them.
        slots: slot arithmetic.
        max_pages: pages of the longest sequence.
    """

    brancher: Brancher
    width: int
    slots: SlotMap
    max_pages: int

    def branches(self, request: Request, guesses: Sequence[int], budget: int) -> list[list[int]]:
        """Other guesses of a row, for which the step has `budget` tokens left. None where the
        guesses would end their page: a tree never crosses a border; or where more is asked of the
        row than tokens."""
        slot, size = int(self.slots.slot_of(request.planned)), self.slots.page_size
        room = size - 2 - self.slots.landmarks - slot % size
        fewer = self.max_pages - 1 - slot // size
        if request.asks_more or not 0 < len(guesses) <= room:
            return []
        count = min(self.width - 1, fewer, budget // (1 + len(guesses)))
        return self.brancher.others(request, guesses, count) if count > 0 else []
