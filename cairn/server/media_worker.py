"""Worker process that decodes and resizes images, isolated because image files are untrusted.

Started by `MediaPreparer` as `python -m cairn.server.media_worker SECONDS BYTES`. The first message
is a Setting, each further one is Files: an image or the frames of a video. A file that exceeds the
time or the memory ends the process.
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
    """How the model's images are resized and encoded."""

    media: MediaSpec
    limits: MediaLimits


class Files(msgspec.Struct, frozen=True):
    """The encoded files of an image, or of the frames of a video."""

    modality: str
    data: list[bytes]
    name: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The message and hint of the error for an item that cannot be read."""

    message: str
    hint: str | None


class Made(msgspec.Struct, frozen=True, tag=True):
    """The prepared item."""

    item: Prepared


Answer = Refused | Made


def begin(first: bytes) -> Work:
    """Decode the Setting. Returns the function that prepares the item of a message."""
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
