"""`vision_config` and the preprocessor files of a folder -> VisionSpec."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.errors import BadModel
from cairn.models.fields import ConfigFields, refuse
from cairn.specs.vision import MediaSpec, PixelBounds, VisionSpec

TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
IMAGES, VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"


def vision_spec(config: Mapping[str, Any], hidden: int) -> VisionSpec:
    """Map `vision_config`, and the ids of placeholder tokens beside it.

    Args:
        config: the whole config.json.
        hidden: width of the language model's residual stream.

    Raises:
        BadModel: a field is impossible or not supported.
    """
    written = config["vision_config"]
    if not isinstance(written, dict):
        raise refuse("vision_config", written, "not an object", "Write an object or leave it out")
    f = ConfigFields(written)
    activation = written.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise refuse("vision_config.hidden_act", activation, "unsupported", "Use another model")
    if written.get("deepstack_visual_indexes"):
        raise refuse(
            "vision_config.deepstack_visual_indexes",
            written["deepstack_visual_indexes"],
            "features of inner blocks are not supported",
            "Use a model without them",
        )
    if f.integer("in_channels", 3) != 3:
        raise refuse("vision_config.in_channels", written["in_channels"], "not 3", "Write 3")
    width, heads = f.integer("hidden_size", 1152), f.integer("num_heads", 16)
    if width % heads or width // heads % 4:
        raise refuse(
            "vision_config.num_heads",
            heads,
            f"{width} dimensions (hidden_size) make no heads of a multiple of 4",
            "Write the number of heads of the weights",
        )
    positions = f.integer("num_position_embeddings", 2304)
    side = math.isqrt(positions)
    if side * side != positions:
        raise refuse(
            "vision_config.num_position_embeddings", positions, "not a square", "Write a square"
        )
    out = f.integer("out_hidden_size", hidden)
    if out != hidden:
        raise refuse(
            "vision_config.out_hidden_size", out, f"hidden_size is {hidden}", f"Write {hidden}"
        )
    tokens = ConfigFields(config)
    image, video, start, end = (tokens.integer(n, d, low=0) for n, d in TOKENS.items())
    media = MediaSpec(
        image,
        video,
        start,
        end,
        patch=f.integer("patch_size", 16),
        merge=f.integer("spatial_merge_size", 2),
        frames=f.integer("temporal_patch_size", 2),
    )
    inner = f.integer("intermediate_size", 4304)
    return VisionSpec(f.integer("depth", 27), width, heads, inner, out, side, media)


def with_preprocessing(spec: VisionSpec, folder: Path) -> VisionSpec:
    """The spec with the sizes and numbers of the folder's preprocessor files.

    Raises:
        BadModel: a file is no JSON object, contradicts config.json or asks for what is not
            supported.
    """
    media = spec.media
    images, videos = _read(folder / IMAGES), _read(folder / VIDEOS)
    for name, given in ((IMAGES, images), (VIDEOS, videos)):
        for field, value in (
            ("patch_size", media.patch),
            ("merge_size", media.merge),
            ("temporal_patch_size", media.frames),
        ):
            if given.get(field, value) != value:
                raise BadModel(
                    f"{name}: {field} is {given[field]}, but config.json says {value}",
                    "Use files of the same checkpoint",
                )
    media = replace(
        media,
        mean=_channels(images, "image_mean", media.mean),
        std=_channels(images, "image_std", media.std),
        images=_bounds(IMAGES, images, media.images),
        videos=_bounds(VIDEOS, videos, media.videos),
        fps=float(videos.get("fps") or media.fps),
        fewest_frames=int(videos.get("min_frames") or media.fewest_frames),
        most_frames=int(videos.get("max_frames") or media.most_frames),
    )
    return replace(spec, media=media)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise BadModel(f"{path} is not JSON: {error}", "Copy the file again") from None
    if not isinstance(found, dict):
        raise BadModel(f"{path} is not a JSON object", "Copy the file again")
    return found


def _channels(given: Mapping[str, Any], name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = given.get(name)
    if value is None:
        return default
    numbers = isinstance(value, list) and len(value) == 3
    if not numbers or not all(isinstance(n, int | float) for n in value):
        raise BadModel(f"{IMAGES}: {name} is {value!r}: not three numbers", "Copy the file again")
    return tuple(float(n) for n in value)


def _bounds(file: str, given: Mapping[str, Any], default: PixelBounds) -> PixelBounds:
    """`size`, or the older `min_pixels` and `max_pixels`."""
    size = given.get("size")
    size = size if isinstance(size, dict) else {}
    least = given.get("min_pixels") or size.get("shortest_edge") or default.least
    most = given.get("max_pixels") or size.get("longest_edge") or default.most
    if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
        raise BadModel(
            f"{file}: sizes from {least!r} to {most!r} pixels are none", "Copy the file again"
        )
    return PixelBounds(least, most)
