"""Image decoding and sizes, compared with transformers' image processor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from cairn.engine.media.pixels import decoded, prepared_image, prepared_video, smart_size
from cairn.errors import BadRequest
from cairn.models.registry import load_spec
from cairn.models.vision.encoder import VisionEncoder
from cairn.specs.vision import MediaSpec, PixelBounds
from tests.seeing import bomb, config, file_of, media_spec, picture

RELEASED = MediaSpec(248056, 248057, 248053, 248054)


@pytest.mark.parametrize(
    ("height", "width"), [(37, 61), (300, 20), (2, 2), (16, 16), (5000, 4999), (1, 3), (4, 6)]
)
def test_sizes_are_the_reference_processors(height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for factor, bounds in ((32, RELEASED.images), (8, PixelBounds(256, 1920))):
        wanted = smart_resize(height, width, factor, bounds.least, bounds.most)
        assert smart_size(height, width, factor, bounds) == wanted


def test_pixels_are_the_reference_processors() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 256, "longest_edge": 1920}
    numbers = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.2, 0.3]}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=4, **numbers)
    media = replace(media_spec(), images=PixelBounds(256, 1920))
    media = replace(media, mean=(0.5, 0.4, 0.3), std=(0.5, 0.2, 0.3))
    vision = load_spec(config()).vision
    with torch.device("meta"):
        encoder = VisionEncoder(replace(vision, media=media), torch.float32)
    for seed, (height, width) in enumerate([(37, 61), (16, 24), (100, 90)]):
        image = picture(seed, height, width)
        found = prepared_image(image, media)
        wanted = processor(images=[image], return_tensors="pt")
        t, h, w = wanted["image_grid_thw"][0].tolist()
        assert found.grid == (t, h // 2, w // 2)
        patches = encoder.patches(torch.from_numpy(found.item.array().copy()))
        assert torch.equal(patches, wanted["pixel_values"])


def test_formats_and_orientation() -> None:
    image = picture(1)
    for form in ("PNG", "WEBP", "BMP"):
        options = {"lossless": True} if form == "WEBP" else {}
        assert np.array_equal(decoded(file_of(image, form, **options), 10**6), image)
    assert decoded(file_of(image, "JPEG"), 10**6).size == image.size
    assert decoded(file_of(image.convert("RGBA")), 10**6).mode == "RGB"
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decoded(file_of(image, "PNG", exif=exif), 10**6)
    assert turned.size == image.size[::-1]


BAD = {
    "truncated": (file_of(picture(1))[:200], "broken or truncated"),
    "text": (b"no image at all", "no image that can be read"),
    "empty": (b"", "no image that can be read"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "no image that can"),
    "one pixel": (file_of(picture(1, 1, 1)), "1 x 1"),
    "a line": (file_of(picture(1, 2, 500)), "200 times"),
    "bomb": (bomb(20000), "pixels"),
    "large": (bomb(1100), "1100 x 1100, more than 1000000 pixels"),
    "tiff": (file_of(picture(1), "TIFF"), "PNG, JPEG"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images(name: str) -> None:
    data, words = BAD[name]
    with pytest.raises(BadRequest, match=words):
        decoded(data, 10**6)


def test_frames_of_a_video() -> None:
    media = media_spec()
    frames = [picture(seed) for seed in range(5)]
    whole = prepared_video(frames, media)
    assert whole.grid == (3, 3, 4)
    assert whole.seconds == pytest.approx((0.5 / 24, 2.5 / 24, 4 / 24))
    assert prepared_video(frames[:1], media).grid[0] == 1
    long = [picture(seed % 7) for seed in range(48)]
    sampled = prepared_video(long, media, fps=12.0)
    # 4 seconds at 2 frames a second.
    assert sampled.grid[0] == 4 and sampled.item.shape[0] == 8
    assert sampled.seconds[0] == pytest.approx((0 + 7) / 2 / 12)


def test_hashes() -> None:
    media = media_spec()
    one, same, other = (prepared_image(picture(n), media) for n in (1, 1, 2))
    assert one.item.digest == same.item.digest != other.item.digest
