"""Decodes and resizes images, as a process of its own: image files come from anyone.

`python -m cairn.server.media_worker SECONDS BYTES` is run by `cairn.server.media`. The first
message says how images enter prompts, each of the others is an image or the frames of a video. A
file that takes more than SECONDS or that much memory may end the process.
"""

from __future__ import annotations

import sys

import msgspec

from cairn.engine.media.given import Given, prepared
from cairn.engine.media.pixels import Prepared
from cairn.errors import BadRequest
from cairn.server.worker import Work, serve
from cairn.specs.media import MediaLimits
from cairn.specs.vision import IMAGE, MediaSpec


class Setting(msgspec.Struct, frozen=True):
    """How images enter prompts."""

    media: MediaSpec
    limits: MediaLimits


class Files(msgspec.Struct, frozen=True):
    """An image, or a video's frames, as files."""

    modality: str
    data: list[bytes]
    name: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why an item cannot be read, and what to do."""

    message: str
    hint: str | None


class Made(msgspec.Struct, frozen=True, tag=True):
    """The prepared item."""

    item: Prepared


Answer = Refused | Made


def begin(first: bytes) -> Work:
    """The function that prepares the items of a message."""
    setting = msgspec.msgpack.decode(first, type=Setting)

    def work(message: bytes) -> bytes:
        files = msgspec.msgpack.decode(message, type=Files)
        value = files.data[0] if files.modality == IMAGE else files.data
        answer: Answer
        try:
            given = Given(files.modality, value, files.name)
            answer = Made(prepared(given, setting.media, setting.limits))
        except BadRequest as error:
            answer = Refused(error.message, error.hint)
        return msgspec.msgpack.encode(answer)

    return work


if __name__ == "__main__":
    serve(begin, float(sys.argv[1]), int(sys.argv[2]))
