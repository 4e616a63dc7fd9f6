"""Images and videos of a model: how they are prepared, and the encoder that reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

IMAGE, VIDEO = "image", "video"
MODALITIES = (IMAGE, VIDEO)


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Pixels that an image, or all frames of a video together, have once it is resized."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class MediaSpec:
    """Preprocessing of images and videos, and their placeholder tokens.

    Attributes:
        image_token, video_token: ids of placeholder tokens; one stands in front of each embedding
            of an encoder.
        start_token, end_token: ids around the placeholders of an image, or of a frame of a video.
        patch: pixels of a patch's side.
        merge: patches of the side of a square that becomes one embedding.
        frames: of a video that a patch spans; an image is repeated as often.
        mean, std: by channel, of pixels scaled to [0, 1].
        images, videos: sizes after resizing.
        fps: frames a second that are taken of a video.
        fewest_frames, most_frames: that are taken of a video.
        axes: positions of a token: 1, or 3 (time, height, width).
    """

    image_token: int
    video_token: int
    start_token: int
    end_token: int
    patch: int = 16
    merge: int = 2
    frames: int = 2
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    images: PixelBounds = PixelBounds(65536, 16777216)
    videos: PixelBounds = PixelBounds(4096, 25165824)
    fps: float = 2.0
    fewest_frames: int = 4
    most_frames: int = 768
    axes: int = 3

    @property
    def most_tokens(self) -> int:
        """Embeddings of the largest image or video."""
        pixels = max(self.images.most, self.videos.most // self.frames)
        return pixels // (self.patch * self.merge) ** 2

    def square_sides(self, longest: int) -> list[int]:
        """Sides of square images from the smallest to the largest, with at most `longest`
        embeddings, each with four times those of the one before."""
        factor = self.patch * self.merge
        least = max(1, math.isqrt(self.images.least) // factor)
        most = max(least, math.isqrt(min(self.images.most // factor**2, longest)))
        sides = [least << i for i in range((most // least).bit_length())]
        return [factor * side for side in dict.fromkeys([*sides, most])]


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A vision transformer: patches of an image -> embeddings of the language model.

    Attributes:
        depth: blocks.
        width: of its residual stream, D.
        heads: of attention.
        inner: width of its feed-forward parts.
        out: width of the embeddings.
        side: rows, and columns, of its table of learned positions.
        media: what it reads.
        prefix: of the names of its tensors in a checkpoint.
        eps: of its layer norms.
        theta: base of its rotary frequencies.
    """

    depth: int
    width: int
    heads: int
    inner: int
    out: int
    side: int
    media: MediaSpec
    prefix: str = "model.visual."
    eps: float = field(default=1e-6)
    theta: float = field(default=10000.0)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head of attention, all of which rotate."""
        return self.width // self.heads

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch: channels, frames, rows, columns."""
        return 3 * self.media.frames * self.media.patch**2
