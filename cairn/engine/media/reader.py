"""Reads a request's images and videos into pixels and placeholder tokens of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from cairn.engine.media.given import TEXT_ALONE, Given, check_counts, prepared
from cairn.engine.media.pixels import Prepared
from cairn.engine.media.prompt import placed
from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadRequest
from cairn.runner.media import PromptMedia
from cairn.specs.media import MediaLimits
from cairn.specs.vision import IMAGE, VIDEO, MediaSpec


class MediaReader:
    """Reads images and videos for one model.

    Args:
        media: of the model; None: it reads text alone.
        limits: of number, size and source.
        tokenizer: None: prompts are token ids.
    """

    def __init__(
        self, media: MediaSpec | None, limits: MediaLimits, tokenizer: Tokenizer | None
    ) -> None:
        self.media, self.limits, self._tokenizer = media, limits, tokenizer

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Modality -> its placeholder text in a prompt; empty if the model reads text only."""
        if self.media is None or self._tokenizer is None:
            return MappingProxyType({})
        media, text = self.media, self._tokenizer.token_text
        start, end = text(media.start_token), text(media.end_token)
        tokens = {IMAGE: media.image_token, VIDEO: media.video_token}
        return {modality: f"{start}{text(token)}{end}" for modality, token in tokens.items()}

    def check(self, given: Sequence[Given]) -> None:
        """Raise BadRequest if the model reads no images, or there are too many."""
        if given and self.media is None:
            raise BadRequest(f"{given[0].name} is {_named(given[0])}, but {TEXT_ALONE}")
        check_counts(given, self.limits)

    def read(
        self, ids: Sequence[int], given: Sequence[Given]
    ) -> tuple[Sequence[int], PromptMedia | None]:
        """A prompt's ids with all placeholders, and the items and spans; decodes in this process.

        Raises BadRequest for an item that cannot be read, or has no placeholder in the prompt.
        """
        self.check(given)
        if not given or self.media is None:
            return ids, None
        return self.place(ids, [prepared(one, self.media, self.limits) for one in given])

    def place(self, ids: Sequence[int], items: Sequence[Prepared]) -> tuple[list[int], PromptMedia]:
        """As `read`, for decoded items."""
        assert self.media is not None
        encode = None
        if self._tokenizer is not None:
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return placed(list(ids), items, self.media, encode)


def _named(given: Given) -> str:
    return "an image" if given.modality == IMAGE else "a video"
