"""A small model with a vision encoder, a tokenizer and a chat template."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cairn.models.registry import load_spec
from cairn.specs.vision import MediaSpec, PixelBounds

SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> "
SPECIAL += "<|video_pad|>"
FIRST = 256
IDS = {name: FIRST + i for i, name in enumerate(SPECIAL.split())}
IMAGE, VIDEO = IDS["<|image_pad|>"], IDS["<|video_pad|>"]
START, END = IDS["<|vision_start|>"], IDS["<|vision_end|>"]
VOCAB = 264
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5,
        "mrope_interleaved": True, "mrope_section": [3, 3, 2],
    },
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
    "num_position_embeddings": 25, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}  # fmt: skip
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{%- endif -%}"""


def config(**text: Any) -> dict[str, Any]:
    """Config of the model; `text` changes fields of its text model."""
    return {
        "model_type": "qwen3_5",
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": False,
        "text_config": {"model_type": "qwen3_5_text", **TEXT, **text},
        "vision_config": {"model_type": "qwen3_5", **VISION},
    }


def write(folder: Path, template: str | None = TEMPLATE, **text: Any) -> Path:
    """The model's folder, without weights (load_format "random")."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**text)))
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(sizes))
    vocab = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(IDS))
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<|im_end|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def media_spec() -> MediaSpec:
    """Media spec of the model."""
    vision = load_spec(config()).vision
    assert vision is not None
    bounds = PixelBounds(256, 4096)
    return replace(vision.media, images=bounds, videos=bounds)


def picture(seed: int, height: int = 24, width: int = 32) -> Image.Image:
    """An image of random pixels."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """An image as the bytes of a file."""
    target = io.BytesIO()
    image.save(target, form, **options)
    return target.getvalue()


def bomb(side: int) -> bytes:
    """A PNG whose header says side * side pixels, with data for one."""
    one = file_of(Image.new("1", (1, 1)))
    header = b"IHDR" + struct.pack(">II", side, side) + one[24:29]
    return one[:12] + header + struct.pack(">I", zlib.crc32(header)) + one[33:]


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def question(*urls: str, text: str = "What is it?") -> list[dict[str, Any]]:
    """A message with images."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
