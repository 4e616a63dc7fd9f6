"""Images and videos of a request: from parts of messages, or from `multi_modal_data`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from reprlib import repr as short
from typing import Any, overload

from PIL import Image

from cairn.engine.media.pixels import (
    Prepared,
    check_size,
    decoded,
    prepared_image,
    prepared_video,
    rgb_array,
)
from cairn.engine.media.sources import read_url
from cairn.errors import BadRequest
from cairn.names import refuse_unknown
from cairn.specs.media import MediaLimits
from cairn.specs.vision import MODALITIES, VIDEO, MediaSpec

PARTS = {f"{modality}{form}": modality for modality in MODALITIES for form in ("", "_url", "_pil")}
"""Type of a content part -> modality. A part has its value under the key named like its type."""
TEXT_ALONE = "this model reads text only"


@dataclass(frozen=True, slots=True)
class Given:
    """An image or a video of a request, before it is read.

    Attributes:
        modality: "image" or "video".
        value: a URL, the bytes of a file, an image of Pillow, or an array of pixels; of a video
            also a list of images, or any of this with {"fps": frames a second}.
        name: its path in the request, for error messages.
    """

    modality: str
    value: Any
    name: str


def taken_out(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Given]]:
    """The messages with image and video parts reduced to {"type": modality}, and the images and
    videos of these parts, in order.

    Raises BadRequest for a part that holds nothing.
    """
    found: list[Given] = []
    told: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = [
                _part(part, f"messages[{i}].content[{j}]", found) for j, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        told.append(message)
    return told, found


def _part(part: Any, name: str, found: list[Given]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    modality = PARTS.get(kind) if isinstance(kind, str) else None
    if modality is None:
        return part
    value = part.get(kind)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if value is None:
        raise BadRequest(f"{name} is of type {kind!r} but has no {kind!r}", "Give a data: URL")
    found.append(Given(modality, value, name))
    return {"type": modality}


def of_data(data: Any) -> list[Given]:
    """The images and videos of `multi_modal_data`: {"image": one or a list, "video": the same}.

    Raises BadRequest for anything else.
    """
    if not isinstance(data, Mapping):
        raise BadRequest(
            f"multi_modal_data must be a mapping, not {type(data).__name__}",
            'Use {"image": image} or {"image": [image, ...]}',
        )
    refuse_unknown("multi_modal_data", data, MODALITIES)
    found = []
    for modality in MODALITIES:
        value = data.get(modality)
        if value is None:
            continue
        several = isinstance(value, list) and not (modality == VIDEO and _is_frames(value))
        for i, one in enumerate(value if several else [value]):
            found.append(Given(modality, one, f"multi_modal_data[{modality!r}][{i}]"))
    return found


def check_counts(given: Sequence[Given], limits: MediaLimits) -> None:
    """Raise BadRequest for more images or videos than a prompt may have."""
    for modality in MODALITIES:
        count = sum(one.modality == modality for one in given)
        if count > limits.count(modality):
            raise BadRequest(
                f"the prompt has {count} {modality}s, of at most {limits.count(modality)}",
                "Send fewer, or raise limit_mm_per_prompt (--limit-mm-per-prompt)",
            )


def prepared(given: Given, media: MediaSpec, limits: MediaLimits) -> Prepared:
    """Read, decode and resize an image or a video.

    Raises BadRequest if it cannot be read.
    """
    value, fps = given.value, None
    try:
        if given.modality == VIDEO:
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
                value, fps = value[0], _fps(value[1])
            return prepared_video(_frames(value, limits), media, fps)
        return prepared_image(_image(value, limits), media)
    except BadRequest as error:
        raise BadRequest(f"{given.name}: {error.message}", error.hint) from None


def files_of(given: Given, limits: MediaLimits) -> list[bytes]:
    """The bytes of the image file, or of a video's frames, that a URL names.

    Raises BadRequest for a value that is not a URL, or a URL that is not allowed.
    """
    if not isinstance(given.value, str):
        raise BadRequest(f"{given.name} holds {short(given.value)}, not a URL", "Give a data: URL")
    try:
        return read_url(given.value, limits)
    except BadRequest as error:
        raise BadRequest(f"{given.name}: {error.message}", error.hint) from None


class Frames(Sequence[Image.Image]):
    """Frames of a video, decoded one by one when they are asked for.

    Args:
        files: their bytes.
        most_pixels: of each.
    """

    def __init__(self, files: Sequence[bytes], most_pixels: int) -> None:
        self._files, self._most = files, most_pixels

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Image.Image]: ...

    def __getitem__(self, index: int | slice) -> Image.Image | Sequence[Image.Image]:
        if isinstance(index, slice):
            return type(self)(self._files[index], self._most)
        return decoded(self._files[index], self._most)


def _image(value: Any, limits: MediaLimits) -> Image.Image:
    if isinstance(value, str):
        (value,) = _single(read_url(value, limits))
    if isinstance(value, bytes):
        return decoded(value, limits.pixels)
    if isinstance(value, Image.Image):
        image = value.convert("RGB")
    else:
        array = rgb_array(value)
        if array.ndim != 3:
            raise BadRequest(f"an image is an array {list(array.shape)}", "Give [height, width, 3]")
        image = Image.fromarray(array)
    check_size(*image.size, limits.pixels)
    return image


def _frames(value: Any, limits: MediaLimits) -> Sequence[Image.Image]:
    if isinstance(value, str):
        return Frames(read_url(value, limits), limits.pixels)
    if isinstance(value, list) and value and all(isinstance(one, bytes) for one in value):
        return Frames(value, limits.pixels)
    images: Iterator[Any] = iter(value if isinstance(value, list) else rgb_array(value))
    frames = list(map(partial(_image, limits=limits), images))
    if not frames:
        raise BadRequest("the video has no frames", "Give one or more")
    return frames


def _single(files: list[bytes]) -> list[bytes]:
    if len(files) != 1:
        raise BadRequest(f"an image's URL holds {len(files)} files", "Send a video as video_url")
    return files


def _is_frames(value: list[Any]) -> bool:
    """Whether a list is one video: of images, not of arrays of frames or of URLs."""
    return bool(value) and isinstance(value[0], Image.Image)


def _fps(metadata: Mapping[str, Any]) -> float:
    fps = metadata.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or fps <= 0:
        raise BadRequest(f"a video's fps is {fps!r}", "Give frames a second, above 0")
    return float(fps)
