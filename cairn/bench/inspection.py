"""What a model is, what it takes and what fits in this machine; no weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from cairn.attention.base import AttentionLayer
from cairn.attention.registry import cache_specs
from cairn.cache.landmarks import SlotMap
from cairn.config import EngineConfig, EngineOptions, format_layers, resolve
from cairn.engine.build import (
    attention_layers,
    bytes_of_pages,
    model_facts,
    page_format,
    this_machine,
)
from cairn.engine.memory import pages_in
from cairn.models.registry import load_spec
from cairn.models.spec import ModelSpec, describe
from cairn.models.weight_map import parameter_count

GEOMETRY = (
    "architecture",
    "vocab_size",
    "landmark_id",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "max_model_len",
    "dtype",
)


def inspection(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything `cairn inspect` prints, section by section.

    Args:
        folder: the model.
        options: keywords of LLM.

    Raises:
        BadModel, BadConfig: as the engine would.
    """
    spec = load_spec(folder)
    chosen = EngineOptions(**options)
    config = resolve(chosen, model_facts(spec), this_machine(chosen.device))
    layers = attention_layers(spec, config)
    return {
        "model": {"folder": folder.name} | {name: getattr(spec, name) for name in GEOMETRY},
        "layers": _layers(layers),
        "memory": _memory(spec, config, layers, chosen.max_model_len),
        "choices": [str(choice) for choice in config.choices],
        "warnings": list(config.warnings) or ["none"],
        "switches": [
            {"name": name, "value": value, "from": source} for name, value, source in describe(spec)
        ],
    }


def _layers(layers: tuple[AttentionLayer, ...]) -> dict[str, str]:
    """Ranges of equal layers and what they are."""

    def kind(layer: AttentionLayer) -> str:
        if layer.landmark is not None and layer.selects:
            rule = layer.landmark
            return (
                f"landmark selection: top {rule.topk} pages and a window of {rule.window} slots, "
                f"{rule.summary} summaries"
            )
        seen = "all slots" if layer.window is None else f"a window of {layer.window} slots"
        return f"{layer.backend}: {seen}"

    found: dict[str, str] = {}
    for text, group in groupby(layers, key=kind):
        found[format_layers([layer.index for layer in group])] = text
    return found


def _memory(
    spec: ModelSpec,
    config: EngineConfig,
    layers: tuple[AttentionLayer, ...],
    asked_len: int | None,
) -> dict[str, Any]:
    """Parameters, bytes of everything, and the longest sequence that free memory holds."""
    dtype = getattr(torch, config.dtype)
    specs = cache_specs(layers)
    form = page_format(config)
    page_bytes = bytes_of_pages(form, specs)
    page = page_bytes.shared
    slots = SlotMap(config.page_size, spec.landmarks)
    parameters = parameter_count(spec)
    weights = parameters * dtype.itemsize
    free = this_machine(config.device).free_memory
    fits = pages_in(free - weights, page_bytes, config) * slots.tokens_per_page
    numbers = sum(2 * math.prod(form.key_shape(s)) for s in specs)
    summary = page + page_bytes.window - numbers * form.key_dtype.itemsize
    own = {"bytes_per_window_page": page_bytes.window} if page_bytes.window else {}
    return {
        "parameters": parameters,
        "weights_bytes": weights,
        "bytes_per_token": round(page / slots.tokens_per_page, 1),
        "bytes_per_page": page,
        **own,
        "summary_bytes_per_page": summary,
        "tokens_per_page": slots.tokens_per_page,
        "free_bytes": free,
        "tokens_that_fit": fits,
        "longest_sequence": min(fits, asked_len or spec.max_model_len),
    }
