"""Decoding by Pillow, and sizes as the models' processors choose them.

Source of sizes: `smart_resize` of the image processor of Qwen2-VL and of the video processor of
Qwen3-VL in transformers. Resizing is bicubic, as of transformers' Pillow backend.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from cairn.errors import BadRequest
from cairn.runner.media import MediaItem
from cairn.specs.vision import IMAGE, VIDEO, MediaSpec, PixelBounds

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LONGEST_RATIO = 200
"""Largest ratio of an image's sides, as in the models' processors."""
SMALLEST_SIDE = 2
"""Fewest pixels of a side: the models' processors take an axis of length 1 for the channels."""
UNKNOWN_FPS = 24.0
"""Frames a second of a video that says nothing, as in the models' processors."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image or a video, ready for a prompt.

    Attributes:
        modality: "image" or "video".
        item: its pixels.
        grid: number of embeddings in time, height and width.
        seconds: of a video, the time of each group of frames.
    """

    modality: str
    item: MediaItem
    grid: tuple[int, int, int]
    seconds: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of embeddings."""
        return math.prod(self.grid)


def decoded(data: bytes, most_pixels: int) -> Image.Image:
    """An image file as RGB. The size in its header is checked before anything is decoded.

    Raises:
        BadRequest: not an image of `FORMATS`, a broken one, or one of more than `most_pixels`.
    """
    try:
        with warnings.catch_warnings():
            # Sizes are checked below, before anything is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(*image.size, most_pixels)
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError:
        raise BadRequest(
            f"the image has more than {most_pixels} pixels", "Send a smaller one"
        ) from None
    except UnidentifiedImageError:
        raise BadRequest(
            "the data is no image that can be read", f"Send one of {', '.join(FORMATS)}"
        ) from None
    except BadRequest:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, OverflowError) as error:
        raise BadRequest(
            f"the image is broken or truncated: {str(error)[:200] or type(error).__name__}",
            "Send the whole file",
        ) from None


def check_size(width: int, height: int, most_pixels: int) -> None:
    """Raise BadRequest for sizes that no processor takes."""
    if width * height > most_pixels:
        raise BadRequest(
            f"the image is {width} x {height}, more than {most_pixels} pixels (max_image_pixels)",
            "Send a smaller one",
        )
    if min(width, height) < SMALLEST_SIDE:
        raise BadRequest(
            f"the image is {width} x {height}, but a side has {SMALLEST_SIDE} pixels or more",
            "Send a larger one",
        )
    if max(width, height) > LONGEST_RATIO * min(width, height):
        raise BadRequest(
            f"the image is {width} x {height}: one side is more than {LONGEST_RATIO} times the "
            "other",
            "Cut it into parts",
        )


def smart_size(height: int, width: int, factor: int, bounds: PixelBounds) -> tuple[int, int]:
    """Height and width of an image after resizing: multiples of `factor`, within the bounds."""
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > bounds.most:
        return _shrunk(height, width, factor, math.sqrt(height * width / bounds.most))
    if h * w < bounds.least:
        return _grown(height, width, factor, math.sqrt(bounds.least / (height * width)))
    return h, w


def smart_video_size(
    frames: int, height: int, width: int, media: MediaSpec, bounds: PixelBounds
) -> tuple[int, int]:
    """Height and width of a video's frames after resizing; the bounds are for the sum of all
    frames."""
    factor = media.patch * media.merge
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    h, w = round(height / factor) * factor, round(width / factor) * factor
    count = round(frames / media.frames) * media.frames
    if count * h * w > bounds.most:
        scale = math.sqrt(frames * height * width / bounds.most)
        return _shrunk(height, width, factor, scale)
    if count * h * w < bounds.least:
        scale = math.sqrt(bounds.least / (frames * height * width))
        return _grown(height, width, factor, scale)
    return h, w


def prepared_image(image: Image.Image, media: MediaSpec) -> Prepared:
    """An RGB image, resized."""
    size = smart_size(image.height, image.width, media.patch * media.merge, media.images)
    return _prepared(IMAGE, _resized([image], [0], size), media)


def prepared_video(
    frames: Sequence[Image.Image], media: MediaSpec, fps: float | None = None
) -> Prepared:
    """RGB frames of one size, resized.

    Args:
        frames: in order.
        media: of the model.
        fps: frames a second, from which `media.fps` a second are sampled; None: all are taken.
    """
    taken = list(range(len(frames)))
    if fps is not None:
        most = min(media.most_frames, len(frames))
        count = min(max(int(len(frames) / fps * media.fps), media.fewest_frames), most)
        taken = np.linspace(0, len(frames) - 1, count).round().astype(int).tolist()
    if len(taken) == 1:
        # The encoder reads groups of frames: a single frame is repeated.
        taken *= media.frames
    first = frames[0]
    size = smart_video_size(len(taken), first.height, first.width, media, media.videos)
    seconds = _group_seconds(taken, UNKNOWN_FPS if fps is None else fps, media.frames)
    return _prepared(VIDEO, _resized(frames, taken, size), media, seconds)


def rgb_array(given: Any) -> Pixels:
    """An image [h, w, 3] or frames [f, h, w, 3] as numbers from 0 to 255.

    Raises BadRequest for another shape or kind of numbers.
    """
    array = np.asarray(given)
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or array.shape[-1] != 3:
        raise BadRequest(
            f"an array of pixels is {array.dtype} {list(array.shape)}",
            "Give uint8 [height, width, 3], of a video [frames, height, width, 3]",
        )
    return array


def _shrunk(height: int, width: int, factor: int, scale: float) -> tuple[int, int]:
    h, w = (max(factor, math.floor(n / scale / factor) * factor) for n in (height, width))
    return h, w


def _grown(height: int, width: int, factor: int, scale: float) -> tuple[int, int]:
    return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor


def _resized(frames: Sequence[Image.Image], taken: Sequence[int], size: tuple[int, int]) -> Pixels:
    """Frames taken[0], taken[1], ... resized: [n, *size, 3]."""
    height, width = size
    found = np.empty((len(taken), height, width, 3), dtype=np.uint8)
    for i, frame in enumerate(frames[number] for number in taken):
        if frame.size != (width, height):
            frame = frame.resize((width, height), Image.Resampling.BICUBIC)
        found[i] = np.asarray(frame)
    return found


def _prepared(
    modality: str, pixels: Pixels, media: MediaSpec, seconds: tuple[float, ...] = ()
) -> Prepared:
    frames, height, width, _ = pixels.shape
    data, shape = pixels.tobytes(), (frames, height, width)
    digest = hashlib.sha256(b"%s %d %d %d;" % (modality.encode(), *shape) + data).digest()
    factor = media.patch * media.merge
    grid = -(-frames // media.frames), height // factor, width // factor
    return Prepared(modality, MediaItem(shape, data, digest), grid, seconds)


def _group_seconds(taken: Sequence[int], fps: float, size: int) -> tuple[float, ...]:
    """Time in the middle of each group of `size` frames: the mean of its first and last frame's."""
    at = [*taken, *[taken[-1]] * (-len(taken) % size)]
    return tuple((at[i] / fps + at[i + size - 1] / fps) / 2 for i in range(0, len(at), size))
