"""Options of images and videos: how many a prompt may have, how large, and from where."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from cairn.errors import BadConfig
from cairn.specs.choice import Notes
from cairn.specs.model import ModelSpec
from cairn.specs.vision import IMAGE, MODALITIES, VIDEO

COUNTS = {IMAGE: 32, VIDEO: 4}
"""Items of one prompt by default."""
PIXELS = 1 << 26


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of images and videos in a prompt.

    Attributes:
        images, videos: how many.
        pixels: of an image before it is resized.
        folder: of files that `file://` URLs may name; None: none may be.
        domains: hosts that `http://` and `https://` URLs may name.
    """

    images: int = COUNTS[IMAGE]
    videos: int = COUNTS[VIDEO]
    pixels: int = PIXELS
    folder: str | None = None
    domains: tuple[str, ...] = ()

    def count(self, modality: str) -> int:
        """Items of a modality."""
        return self.images if modality == IMAGE else self.videos


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """User options of images and videos, by vLLM's names where they exist.

    Attributes:
        limit_mm_per_prompt: images and videos of one prompt: a JSON object or its text, or
            image=N,video=N. With 0 of both the encoder is not loaded.
        allowed_local_media_path: folder of files that `file://` URLs may name.
        allowed_media_domains: hosts that remote URLs may name, with commas between them.
        max_image_pixels: height times width of an image before it is resized.
    """

    limit_mm_per_prompt: str | dict[str, int] | None = field(
        default=None,
        metadata={
            "metavar": "JSON",
            "help": (
                "Maximum images and videos per prompt, as a JSON object or image=N,video=N. With 0 "
                "for both, the encoder is not loaded.  [default: image=32,video=4]"
            ),
        },
    )
    allowed_local_media_path: str | None = field(
        default=None,
        metadata={
            "metavar": "FOLDER",
            "help": "Folder from which file:// URLs of images may be read.  [default: none]",
        },
    )
    allowed_media_domains: str | tuple[str, ...] | None = field(
        default=None,
        metadata={
            "metavar": "HOSTS",
            "help": (
                "Comma-separated hosts from which http:// and https:// URLs of images may be "
                "fetched.  [default: none]"
            ),
        },
    )
    max_image_pixels: int | None = field(
        default=None,
        metadata={
            "type": int,
            "help": f"Maximum pixels of an image before it is resized.  [default: {PIXELS}]",
        },
    )


def media_options() -> tuple[Field[Any], ...]:
    """The fields of `MediaOptions`; their metadata says what a command line needs of them."""
    return fields(MediaOptions)


def resolve_media(options: MediaOptions) -> MediaLimits:
    """What the options mean. Raises BadConfig for a value that is impossible."""
    counts = COUNTS | _counts(options.limit_mm_per_prompt)
    pixels = PIXELS if options.max_image_pixels is None else options.max_image_pixels
    if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 1:
        raise BadConfig(f"max_image_pixels must be a positive integer, not {pixels!r}")
    folder = options.allowed_local_media_path
    if folder is not None and not Path(folder).is_dir():
        raise BadConfig(f"allowed_local_media_path is {folder!r}: no folder", "Give a folder")
    domains = _domains(options.allowed_media_domains)
    return MediaLimits(counts[IMAGE], counts[VIDEO], pixels, folder, domains)


def media_model(options: MediaOptions, model: ModelSpec, notes: Notes) -> ModelSpec:
    """The model, without its encoder where no prompt may have anything for it."""
    limits = resolve_media(options)
    if model.vision is None or limits.images or limits.videos:
        return model
    notes.chose("vision", "none", "limit_mm_per_prompt allows no images and videos")
    return model.without_vision()


def _counts(given: object) -> dict[str, int]:
    """limit_mm_per_prompt by modality."""
    if given is None:
        return {}
    found: Any = given
    if isinstance(given, str):
        pairs = re.fullmatch(r"\s*(\w+=\d+\s*(,\s*\w+=\d+\s*)*)", given)
        try:
            found = json.loads(given) if pairs is None else dict(_pairs(given))
        except ValueError:
            found = None
    counts = isinstance(found, Mapping) and all(type(n) is int and n >= 0 for n in found.values())
    if not counts or set(found) - set(MODALITIES):
        raise BadConfig(
            f"limit_mm_per_prompt is {given!r}", 'Write {"image": 4, "video": 1} or image=4,video=1'
        )
    return dict(found)


def _pairs(text: str) -> list[tuple[str, int]]:
    split = (part.split("=") for part in text.split(","))
    return [(name.strip(), int(count)) for name, count in split]


def _domains(given: str | Sequence[str] | None) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given or ()
    found = tuple(part.strip().lower() for part in parts)
    for host in found:
        if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host):
            raise BadConfig(
                f"allowed_media_domains has {host!r}", "Give host names without scheme and port"
            )
    return found
