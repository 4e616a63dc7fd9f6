"""Branches: alternative guesses of a row's next tokens, which run in the same step as its main
guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cairn.cache.landmarks import SlotMap
from cairn.engine.request import Request


class Brancher(Protocol):
    """Source of alternative guesses of a row's next tokens."""

    def others(self, request: Request, guesses: Sequence[int], count: int) -> list[list[int]]:
        """Up to `count` alternatives, no longer than the main guesses. Their first tokens differ
        from each other and from the first main guess."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Chooses the branches of a row. Its guesses and branches are a tree whose root is the row's
    last token; each branch runs in a page of its own, a copy of the row's last one.

    Attributes:
        brancher: source of alternative guesses.
        width: chains of guesses per row, including its main guesses.
        slots: slot arithmetic.
        max_pages: pages of the longest sequence.
    """

    brancher: Brancher
    width: int
    slots: SlotMap
    max_pages: int

    def branches(self, request: Request, guesses: Sequence[int], budget: int) -> list[list[int]]:
        """The branches of a row, in a step that has `budget` tokens left. None if the guesses would
        fill their page (a tree never crosses a page border), or if the request needs more than
        tokens."""
        slot, size = int(self.slots.slot_of(request.planned)), self.slots.page_size
        room = size - 2 - self.slots.landmarks - slot % size
        fewer = self.max_pages - 1 - slot // size
        if request.asks_more or not 0 < len(guesses) <= room:
            return []
        count = min(self.width - 1, fewer, budget // (1 + len(guesses)))
        return self.brancher.others(request, guesses, count) if count > 0 else []
