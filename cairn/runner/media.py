"""Preprocessed images and videos of a prompt: pixels, and their placeholder tokens.

Imports no torch: both processes of a server import it.
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
        digest: hash of shape and pixels, the key of embeddings and part of the key of pages.
    """

    shape: tuple[int, int, int]
    pixels: bytes
    digest: bytes

    def array(self) -> NDArray[np.uint8]:
        """The pixels; not to be written."""
        return np.frombuffer(self.pixels, dtype=np.uint8).reshape(*self.shape, 3)


class Span(NamedTuple):
    """Consecutive placeholder tokens of a prompt that embeddings of one item replace.

    Attributes:
        first: index of the first token.
        grid: embeddings in time, height and width, row by row; one token each.
        item: index of the item.
        offset: index of the first embedding in the item's.
    """

    first: int
    grid: tuple[int, int, int]
    item: int
    offset: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        t, h, w = self.grid
        return t * h * w

    @property
    def end(self) -> int:
        """Index after the last token."""
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
        """Digests that distinguish pages with these tokens from pages with the same token ids."""
        return tuple(
            Mark(s.first, s.end, self.items[s.item].digest + s.offset.to_bytes(8, "little"))
            for s in self.spans
        )


class Insert(NamedTuple):
    """Embeddings of an item that replace tokens of a step.

    Attributes:
        item: the item.
        begin, end: range of its embeddings.
        at: index of the first token in the batch.
    """

    item: MediaItem
    begin: int
    end: int
    at: int


class Placed:
    """Rotary positions (M-RoPE) of the tokens of a prompt with images.

    The position of text grows by one on all axes. Token (a, b, c) of a grid whose first token is at
    position p is at (p + a, p + b, p + c), and text continues at p + max(height, width) of the grid
    (Qwen2-VL, section 2.1).

    Args:
        media: of the prompt.
        axes: 3, or 1: positions are those of a text.

    Attributes:
        media: of the prompt.
        end: index after the last span; the position of a later token is its index plus `delta`.
        delta: see there.
    """

    def __init__(self, media: PromptMedia, axes: int) -> None:
        self.media = media
        self.end = media.spans[-1].end if media.spans else 0
        self.delta = 0
        self._table = self._positions(media.spans) if axes > 1 else self._text(0, self.end, 0)

    def positions(self, begin: int, end: int) -> Ints:
        """Positions of tokens begin, ..., end - 1: [3, n]; [1, n] if equal on all axes."""
        known = self._table[:, begin : min(end, self.end)]
        if not any(s.first < end and begin < s.end for s in self.media.spans):
            known = known[:1]
        behind = np.arange(max(begin, self.end), max(end, self.end)) + self.delta
        return np.concatenate((known, np.broadcast_to(behind, (len(known), len(behind)))), axis=1)

    def inserts(self, begin: int, end: int, at: int) -> list[Insert]:
        """Embeddings that replace tokens begin, ..., end - 1; token `begin` has index `at` in the
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
