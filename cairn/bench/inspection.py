"""`cairn inspect`: geometry, memory need and capacity of a model, without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.attention.registry import cache_schema
from cairn.cache.landmarks import SlotMap
from cairn.config import EngineConfig, EngineOptions, resolve
from cairn.engine.build import page_format, this_machine
from cairn.engine.memory import PageBytes, pages_in
from cairn.models.registry import load_spec, measure_weights
from cairn.specs.model import ModelSpec, describe, describe_layers

GEOMETRY = (
    "architecture",
    "vocab_size",
    "landmark_id",
    "hidden_size",
    "num_layers",
    "page_size",
    "max_model_len",
    "dtype",
)


def inspection(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that `cairn inspect` prints.

    Args:
        folder: the model.
        options: keywords of LLM.

    Raises:
        BadModel, BadConfig: as at the start of an engine.
    """
    spec = load_spec(folder)
    chosen = EngineOptions(**options)
    config = resolve(chosen, spec, this_machine(chosen.device))
    spec = config.model
    return {
        "model": {"folder": folder.name} | _geometry(spec),
        "layers": describe_layers(spec, lambda layer: layer.mixer.description),
        "feed_forward": describe_layers(spec, lambda layer: layer.ffn.description),
        "memory": _memory(spec, config, chosen.max_model_len),
        "choices": [str(choice) for choice in config.choices],
        "warnings": list(config.warnings) or ["none"],
        "switches": [
            {"name": name, "value": value, "from": source} for name, value, source in describe(spec)
        ],
    }


def _geometry(spec: ModelSpec) -> dict[str, object]:
    """Geometry of a model. Models without landmarks have no landmark id and any page size."""
    found = {name: getattr(spec, name) for name in GEOMETRY}
    if not spec.landmarks:
        del found["landmark_id"]
    if spec.page_size is None:
        found["page_size"] = "any"
    return found


def _memory(spec: ModelSpec, config: EngineConfig, asked_len: int | None) -> dict[str, Any]:
    """Parameters, bytes of weights and cache, and the longest sequence that fits in free memory."""
    schema = cache_schema(spec.mixers, page_format(config))
    page_bytes = PageBytes.of(schema)
    slots = SlotMap(config.page_size, spec.landmarks)
    parameters, weights = measure_weights(spec, config.dtype)
    free = this_machine(config.device).free_memory
    fits = pages_in(free - weights, page_bytes, config) * slots.tokens_per_page
    own = {"bytes_per_window_page": page_bytes.window} if page_bytes.window else {}
    state = {"state_bytes_per_sequence": page_bytes.row} if page_bytes.row else {}
    return {
        "parameters": parameters,
        "weights_bytes": weights,
        "bytes_per_token": round(page_bytes.shared / slots.tokens_per_page, 1),
        "bytes_per_page": page_bytes.shared,
        **own,
        **state,
        "summary_bytes_per_page": schema.summary_bytes,
        "tokens_per_page": slots.tokens_per_page,
        "free_bytes": free,
        "tokens_that_fit": fits,
        "longest_sequence": min(fits, asked_len or spec.max_model_len),
    }
