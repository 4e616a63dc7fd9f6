"""Incremental search for stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class StopFound(NamedTuple):
    """Where an output stops.

    Attributes:
        end: characters of the last piece up to the end of the stop string.
        shown: characters of the stop string that stand in the text; special tokens do not.
        stop: the stop string.
    """

    end: int
    shown: int
    stop: str


class StopSearch:
    """Looks for several stop strings; the one that ends first is found, the longest of those.

    The text of an output leaves special tokens out. A stop string that holds the text of one is
    looked for in the output with its special tokens written out, the others in the text.

    Args:
        stops: what to look for.
        special: texts of the special tokens, by id.
    """

    def __init__(self, stops: Sequence[str], special: Mapping[int, str]) -> None:
        names = [text for text in special.values() if text]
        marked = {stop for stop in stops if any(name in stop for name in names)}
        self._plain = [StopString(stop) for stop in stops if stop not in marked]
        self._marked = [StopString(stop) for stop in stops if stop in marked]
        self._special = special if marked else {}
        self._longest = max(map(len, marked), default=0)
        self._written = 0
        # [begin, end) of special tokens among the last characters written out.
        self._hidden: list[tuple[int, int]] = []

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        plain = max((stop.matched for stop in self._plain), default=0)
        marked = (self._shown(self._written, stop.matched) for stop in self._marked)
        return max(plain, max(marked, default=0))

    def feed(self, piece: str, may_end: bool) -> StopFound | None:
        """Take more text. With `may_end` false nothing is found in it."""
        plain = [
            StopFound(end, len(stop.text), stop.text)
            for stop in self._plain
            if (end := stop.feed(piece, may_end))
        ]
        return _first(plain + self._feed_marked(piece, may_end))

    def feed_special(self, token: int, may_end: bool) -> StopFound | None:
        """Take a token that the text leaves out; any other one is passed over."""
        text = self._special.get(token)
        if not text:
            return None
        begin = self._written
        self._hidden = [span for span in self._hidden if span[1] > begin - self._longest]
        self._hidden.append((begin, begin + len(text)))
        found = _first(self._feed_marked(text, may_end))
        return found._replace(end=0) if found is not None else None

    def _feed_marked(self, piece: str, may_end: bool) -> list[StopFound]:
        begin = self._written
        self._written += len(piece)
        return [
            StopFound(end, self._shown(begin + end, len(stop.text)), stop.text)
            for stop in self._marked
            if (end := stop.feed(piece, may_end))
        ]

    def _shown(self, end: int, size: int) -> int:
        """How many of the `size` characters written out before `end` stand in the text."""
        begin = end - size
        spans = ((max(a, begin), min(b, end)) for a, b in self._hidden)
        return size - sum(b - a for a, b in spans if a < b)


def _first(found: Sequence[StopFound]) -> StopFound | None:
    return min(found, key=lambda one: (one.end, -len(one.stop)), default=None)


class StopString:
    """Looks for one string in a text that comes in pieces, character by character at most once
    (Knuth, Morris, Pratt 1977).

    Attributes:
        text: the string looked for.
        matched: its longest beginning, in characters, that the text so far ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # Failure function of Knuth-Morris-Pratt: borders[k] is the length of the longest proper
        # prefix of text[: k + 1] that is also its suffix; computed as far as it was needed.
        self._borders = [0]

    def feed(self, piece: str, may_end: bool = True) -> int:
        """Take the next piece; returns where in it the string first ends, 0 when it does not.

        With `may_end` false the string is followed but no end is reported.
        """
        text, at = self.text, 0
        while at < len(piece):
            if self.matched == 0:
                at = piece.find(text[0], at)
                if at < 0:
                    break
            while self.matched and piece[at] != text[self.matched]:
                self.matched = self._borders[self.matched - 1]
            if piece[at] == text[self.matched]:
                self.matched += 1
            at += 1
            self._extend_borders()
            if self.matched == len(text):
                self.matched = self._borders[-1]
                if may_end:
                    return at
        return 0

    def _extend_borders(self) -> None:
        size = len(self._borders)
        if self.matched <= size:
            return
        border = self._borders[-1]
        while border and self.text[border] != self.text[size]:
            border = self._borders[border - 1]
        self._borders.append(border + (self.text[border] == self.text[size]))
