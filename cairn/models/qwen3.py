"""Dense Qwen3: its config.json as a ModelSpec. Full causal or window layers, no landmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.models import fields as reading
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, refuse
from cairn.specs.ffn import DenseFfn
from cairn.specs.gqa import GqaSpec
from cairn.specs.model import LayerSpec, ModelSpec, NormSpec
from cairn.specs.rotary import RotarySpec


def spec_from_config(
    config: Mapping[str, Any], overridden: frozenset[str], stored: StoredRows
) -> ModelSpec:
    """Map a config.json with model_type qwen3.

    Args:
        config: the parsed file, overrides merged in.
        overridden: keys that an override set.
        stored: row counts of the weight files; they win over `vocab_size`.

    Raises:
        BadModel: a field is of the wrong type, contradicts another or is not supported.
    """
    f = ConfigFields(config, {name: "override" for name in overridden})
    reading.refuse_quantized(config)
    reading.silu_only(f)
    vocab = f.integer("vocab_size", 151936)
    hidden, inter = f.integer("hidden_size", 4096), f.integer("intermediate_size", 22016)
    heads, kv_heads, head_dim = _heads(f)
    eps, tied = f.number("rms_norm_eps", 1e-6), f.flag("tie_word_embeddings", False)
    max_positions = f.integer("max_position_embeddings", 32768)
    rotary = RotarySpec("standard", head_dim, reading.rope_theta(f), rounded=True)
    bias = f.flag("attention_bias", False)
    norm = NormSpec(eps)
    layers = tuple(
        LayerSpec(
            GqaSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rotary=rotary,
                window=window,
                qk_norm="head",
                qk_eps=eps,
                bias=bias,
            ),
            DenseFfn(inter),
            norm,
        )
        for window in _windows(f, f.integer("num_hidden_layers", 32))
    )
    spec = ModelSpec(
        architecture="qwen3",
        hidden_size=hidden,
        norm=norm,
        chunk_size=None,
        landmarks=False,
        max_model_len=max_positions,
        layers=layers,
        resolved=f.resolved(),
        **reading.vocabulary_fields(config, vocab, tied, stored),
    )
    f.warn_unknown(("layer_types",))
    return spec


def _heads(f: ConfigFields) -> tuple[int, int, int]:
    """h_q, h_kv, d; the head width is a field of its own here."""
    heads = f.integer("num_attention_heads", 32)
    kv_heads = reading.key_value_heads(f, heads, 32)
    head_dim = f.integer("head_dim", 128, low=2)
    if head_dim % 2:
        raise refuse("head_dim", head_dim, "rotary needs pairs", "Write an even head_dim")
    return heads, kv_heads, head_dim


def _windows(f: ConfigFields, num_layers: int) -> list[int | None]:
    """Window of each layer, None: full causal."""
    switch = f.flag("use_sliding_window", False)
    size = f.optional_integer("sliding_window", 4096) if switch else None
    if not switch:
        f.record("sliding_window", None, "derived: use_sliding_window is false")
    first = f.integer("max_window_layers", 28, low=0)
    types = f.layer_types(num_layers)
    if types is None:
        return [size if i >= first else None for i in range(num_layers)]
    if size is None and "sliding_attention" in types:
        raise refuse(
            "layer_types",
            "sliding_attention",
            "no sliding_window is on",
            "Write use_sliding_window: true and sliding_window, or full_attention",
        )
    return [size if kind == "sliding_attention" else None for kind in types]
