"""Images and videos of a prompt as the runner sees them: pixels, and which tokens stand for them.

Loads no torch: both processes of a server import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.cache.radix import Mark

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or a video, resized.

    Attributes:
        shape: frames, height, width.
        pixels: [frames, height, width, 3] uint8, RGB.
        digest: hash of all this, by which embeddings and pages are known.
    """

    shape: tuple[int, int, int]
    pixels: bytes
    digest: bytes

    def array(self) -> NDArray[np.uint8]:
        """The pixels; not to be written."""
        return np.frombuffer(self.pixels, dtype=np.uint8).reshape(*self.shape, 3)


class Span(NamedTuple):
    """Tokens of a prompt, side by side, that stand for embeddings of an item.

    Attributes:
        first: of these tokens.
        grid: embeddings in time, height and width; as many tokens, row by row.
        item: its index.
        offset: of the first embedding among the item's.
    """

    first: int
    grid: tuple[int, int, int]
    item: int
    offset: int = 0

    @property
    def tokens(self) -> int:
        """How many they are."""
        t, h, w = self.grid
        return t * h * w

    @property
    def end(self) -> int:
        """The token behind."""
        return self.first + self.tokens


@dataclass(frozen=True)
class PromptMedia:
    """The images and videos of one prompt.

    Attributes:
        items: in the order of the prompt.
        spans: ascending, without overlap.
    """

    items: tuple[MediaItem, ...]
    spans: tuple[Span, ...]

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """What tells pages with these tokens from those with the same ids."""
        return tuple(
            Mark(s.first, s.end, self.items[s.item].digest + s.offset.to_bytes(8, "little"))
            for s in self.spans
        )


class Insert(NamedTuple):
    """Embeddings of an item that a step needs.

    Attributes:
        item: whose.
        begin, end: which of them.
        at: place of the first in the batch.
    """

    item: MediaItem
    begin: int
    end: int
    at: int


class Placed:
    """Where the tokens of a prompt with images stand on every axis of position.

    Text moves on by one on all axes. A token (a, b, c) of a grid that begins at p stands at
    (p + a, p + b, p + c), and the text behind it at p + max(height, width) of the grid (spec of
    M-RoPE: Qwen2-VL, section 2.1).

    Args:
        media: of the prompt.
        axes: 3, or 1: positions are those of a text.

    Attributes:
        media: of the prompt.
        end: tokens up to the last span's end; those behind are at their number plus `delta`.
        delta: offset of positions behind the last span.
    """

    def __init__(self, media: PromptMedia, axes: int) -> None:
        self.media = media
        self.end = media.spans[-1].end if media.spans else 0
        self.delta = 0
        self._table = self._positions(media.spans) if axes > 1 else self._text(0, self.end, 0)

    def positions(self, begin: int, end: int) -> Ints:
        """Of tokens begin, ..., end - 1: [3, n]; [1, n] where they are the same on all axes."""
        known = self._table[:, begin : min(end, self.end)]
        if not any(s.first < end and begin < s.end for s in self.media.spans):
            known = known[:1]
        behind = np.arange(max(begin, self.end), max(end, self.end)) + self.delta
        return np.concatenate((known, np.broadcast_to(behind, (len(known), len(behind)))), axis=1)

    def inserts(self, begin: int, end: int, at: int) -> list[Insert]:
        """Embeddings that stand for tokens begin, ..., end - 1, the first of which is `at` in the
        batch."""
        found = []
        for span in self.media.spans:
            low, high = max(begin, span.first), min(end, span.end)
            if low < high:
                first = span.offset + low - span.first
                item = self.media.items[span.item]
                found.append(Insert(item, first, first + high - low, at + low - begin))
        return found

    def _positions(self, spans: Sequence[Span]) -> Ints:
        """[3, end], and sets `delta`."""
        parts, token, at = [], 0, 0
        for span in spans:
            text = span.first - token
            grid = np.indices(span.grid).reshape(3, -1)
            parts += [self._text(0, text, at, 3), grid + at + text]
            at += text + max(span.grid[1:])
            token = span.end
        self.delta = at - token
        return np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), dtype=np.int64)

    @staticmethod
    def _text(begin: int, end: int, offset: int, axes: int = 1) -> Ints:
        return np.broadcast_to(np.arange(begin, end) + offset, (axes, end - begin))
