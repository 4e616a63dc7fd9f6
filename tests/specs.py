"""Model specs for tests, and their properties."""

from __future__ import annotations

import torch

from cairn.attention.registry import cache_schema
from cairn.cache.landmarks import SlotMap
from cairn.cache.schema import PageFormat
from cairn.layers.weight import Weight
from cairn.models.decoder import Decoder
from cairn.models.registry import load_spec, measure_weights
from cairn.specs.hils import HilsSpec
from cairn.specs.model import ModelSpec


def landmark_spec(**changes: int) -> ModelSpec:
    """12 layers, of which 3, 7 and 11 select 32 pages; `changes` of its config.json."""
    config = {
        "model_type": "qwen_hils", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 12,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64,
        "hils_sliding_window": 512,
        "hils_topk": 32, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return load_spec({**config, **changes})


def dense_spec() -> ModelSpec:
    """12 layers of full attention."""
    config = {
        "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 12,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    return load_spec(config)


def hils_of(spec: ModelSpec) -> HilsSpec | None:
    """The attention spec of the landmark layers; all layers have the same."""
    return next((mixer for mixer in spec.mixers if isinstance(mixer, HilsSpec)), None)


def kinds(spec: ModelSpec) -> list[str]:
    """The kind of each layer."""
    names = {"dense": "full", "window": "window", "hsa": "hils"}
    return [names[mixer.backend] for mixer in spec.mixers]


def declared(spec: ModelSpec) -> dict[str, Weight]:
    """All tensors of a checkpoint of the model."""
    with torch.device("meta"):
        model = Decoder(spec, torch.float32)
    return {weight.source: weight for weight in model.weights()}


def parameter_count(spec: ModelSpec) -> int:
    """Number of parameters of a checkpoint of the model."""
    return measure_weights(spec, torch.float32)[0]


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype, page_size: int = 64) -> float:
    """Bytes of pages per user token, over all layers."""
    size = spec.page_size or page_size
    (group,) = cache_schema(spec.mixers, PageFormat(size, dtype)).groups
    return group.page_bytes / SlotMap(size, spec.landmarks).tokens_per_page
