"""Placeholder tokens of a prompt: an image's or video's placeholder is repeated once per embedding.

A video becomes, for each group of its frames, the text of its time and the placeholders of the
group between start and end tokens, as the processor of Qwen3-VL in transformers writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cairn.engine.media.pixels import Prepared
from cairn.errors import BadRequest
from cairn.runner.media import PromptMedia, Span
from cairn.specs.vision import IMAGE, VIDEO, MediaSpec

Encode = Callable[[str], Sequence[int]]


def placed(
    ids: Sequence[int], given: Sequence[Prepared], media: MediaSpec, encode: Encode | None
) -> tuple[list[int], PromptMedia]:
    """The prompt with all placeholders, and the items and spans of these.

    Args:
        ids: with one placeholder for each image and video, or with all of them.
        given: the images and videos; those of a modality in the order of their placeholders.
        media: of the model.
        encode: the ids of a text, without special tokens; None: there is no tokenizer.

    Raises:
        BadRequest: the placeholders are not as many as the images or videos.
    """
    tokens = {IMAGE: media.image_token, VIDEO: media.video_token}
    waiting: dict[int, Iterator[Prepared]] = {}
    expanded: set[int] = set()
    for modality, token in tokens.items():
        own = [item for item in given if item.modality == modality]
        found, wanted = ids.count(token), sum(item.tokens for item in own)
        if found not in (len(own), wanted):
            raise BadRequest(
                f"the prompt has {found} placeholders of {modality}s, but {len(own)} {modality}s "
                "are given",
                f"Write one placeholder (token {token}) for each {modality}",
            )
        if found != len(own):
            expanded.add(token)
        waiting[token] = iter(own)
    return _Writer(media, encode, expanded).write(ids, waiting)


class _Writer:
    """Builds a prompt with all placeholders from left to right."""

    def __init__(self, media: MediaSpec, encode: Encode | None, expanded: set[int]) -> None:
        self._media, self._encode, self._expanded = media, encode, expanded
        self._ids: list[int] = []
        self._items: list[Prepared] = []
        self._spans: list[Span] = []
        # Placeholder -> video of which some groups were read, and its next group.
        self._open: dict[int, tuple[int, int]] = {}

    def write(
        self, ids: Sequence[int], waiting: dict[int, Iterator[Prepared]]
    ) -> tuple[list[int], PromptMedia]:
        """The whole prompt; `waiting`: placeholder -> items that were not placed yet."""
        at = 0
        while at < len(ids):
            token = ids[at]
            if token not in waiting:
                self._ids.append(token)
                at += 1
            elif token in self._expanded:
                at += self._known(ids, at, waiting[token])
            else:
                at += self._new(ids, at, next(waiting[token]))
        items = tuple(item.item for item in self._items)
        return self._ids, PromptMedia(items, tuple(self._spans))

    def _new(self, ids: Sequence[int], at: int, item: Prepared) -> int:
        """Write all placeholders of an item in place of the one at `at`; returns the number of
        tokens replaced."""
        number = len(self._items)
        self._items.append(item)
        _, h, w = item.grid
        if item.modality == IMAGE:
            self._span(ids[at], item.grid, 0, number)
            return 1
        start, end = self._media.start_token, self._media.end_token
        between = bool(self._ids) and self._ids[-1] == start and ids[at + 1 : at + 2] == [end]
        if between:
            self._ids.pop()
        for group, seconds in enumerate(item.seconds):
            if self._encode is None:
                raise BadRequest(
                    "a video's times are text, but this model has no tokenizer",
                    "Write all placeholders of the video",
                )
            self._ids += [*self._encode(f"<{seconds:.1f} seconds>"), start]
            self._span(ids[at], (1, h, w), group * h * w, number)
            self._ids.append(end)
        return 2 if between else 1

    def _known(self, ids: Sequence[int], at: int, waiting: Iterator[Prepared]) -> int:
        """Copy the placeholders of one group of frames, which the prompt has already; returns their
        number."""
        token = ids[at]
        number, group = self._open.pop(token, (len(self._items), 0))
        if number == len(self._items):
            self._items.append(next(waiting))
        item = self._items[number]
        groups, h, w = item.grid
        if list(ids[at : at + h * w]) != [token] * (h * w):
            raise BadRequest(
                f"fewer than {h * w} placeholders (token {token}) stand side by side",
                f"Write one for each {item.modality}, or all of them",
            )
        self._span(token, (1, h, w), group * h * w, number)
        if group + 1 < groups:
            self._open[token] = number, group + 1
        return h * w

    def _span(self, token: int, grid: tuple[int, int, int], offset: int, item: int) -> None:
        span = Span(len(self._ids), grid, item, offset)
        self._spans.append(span)
        self._ids += [token] * span.tokens
