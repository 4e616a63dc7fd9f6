"""Dense decoders: Llama, Mistral, Qwen2 and Qwen3, each a config.json as a ModelSpec.

Layers are full causal or window attention; there are no landmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.models import fields as reading
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, refuse
from cairn.models.quantization import quantization_of
from cairn.models.rope import attention_rope
from cairn.specs.ffn import DenseFfn
from cairn.specs.gqa import GqaSpec, NormWidth
from cairn.specs.model import LayerSpec, ModelSpec, NormSpec

Windows = Callable[[ConfigFields, int], list[int | None]]
"""Window of each of this many layers; None: full causal."""


@dataclass(frozen=True)
class _Family:
    """Defaults and properties of a family.

    Attributes:
        vocab, intermediate, positions: defaults of vocab_size, intermediate_size and
            max_position_embeddings.
        kv_heads: default; None: as many as query heads.
        windows: which layers have a window.
        head_dim: default; None: hidden_size / num_attention_heads.
        qk_norm: queries and keys are normed.
        bias: q, k and v projections have a bias; None: as `attention_bias`, which also applies to
            o.
    """

    vocab: int
    intermediate: int
    positions: int
    kv_heads: int | None
    windows: Windows
    head_dim: int | None = None
    qk_norm: NormWidth | None = None
    bias: bool | None = None


def _no_windows(f: ConfigFields, num_layers: int) -> list[int | None]:
    return [None] * num_layers


def _one_window(f: ConfigFields, num_layers: int) -> list[int | None]:
    return [f.optional_integer("sliding_window", 4096)] * num_layers


def _switched_windows(f: ConfigFields, num_layers: int) -> list[int | None]:
    """`use_sliding_window`, then `layer_types`, or all layers from `max_window_layers` on."""
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


FAMILIES = {
    "llama": _Family(32000, 11008, 2048, None, _no_windows),
    "mistral": _Family(32000, 14336, 131072, 8, _one_window, bias=False),
    "qwen2": _Family(151936, 22016, 32768, 32, _switched_windows, bias=True),
    "qwen3": _Family(151936, 22016, 32768, 32, _switched_windows, 128, "head"),
}


def spec_from_config(
    config: Mapping[str, Any], overridden: frozenset[str], stored: StoredRows
) -> ModelSpec:
    """Map a config.json with a model_type of `FAMILIES`.

    Args:
        config: the parsed file, overrides merged in.
        overridden: keys that an override set.
        stored: row counts of the weight files; they win over `vocab_size`.

    Raises:
        BadModel: a field is of the wrong type, contradicts another or is not supported.
    """
    model_type = str(config["model_type"])
    family = FAMILIES[model_type]
    f = ConfigFields(config, {name: "override" for name in overridden})
    quantization = quantization_of(f)
    reading.activation_only(f)
    if f.flag("mlp_bias", False):
        raise refuse(
            "mlp_bias", True, "biases of feed-forward parts are not supported", "Write false"
        )
    vocab, hidden = f.integer("vocab_size", family.vocab), f.integer("hidden_size", 4096)
    inter = f.integer("intermediate_size", family.intermediate)
    heads, kv_heads, head_dim = _heads(f, family, hidden)
    eps, tied = f.number("rms_norm_eps", 1e-6), f.flag("tie_word_embeddings", False)
    max_positions = f.integer("max_position_embeddings", family.positions)
    rotary, longest = attention_rope(f, head_dim, 10000.0, max_positions)
    bias = f.flag("attention_bias", False) if family.bias is None else family.bias
    norm = NormSpec(eps)
    layers = tuple(
        LayerSpec(
            GqaSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rotary=rotary,
                window=window,
                qk_norm=family.qk_norm,
                qk_eps=eps,
                bias=bias,
                out_bias=bias and family.bias is None,
            ),
            DenseFfn(inter),
            norm,
        )
        for window in family.windows(f, f.integer("num_hidden_layers", 32))
    )
    spec = ModelSpec(
        architecture=model_type,
        hidden_size=hidden,
        norm=norm,
        chunk_size=None,
        landmarks=False,
        max_model_len=longest,
        layers=layers,
        resolved=f.resolved(),
        quantization=quantization,
        **reading.vocabulary_fields(config, vocab, tied, stored),
    )
    f.warn_unknown(("layer_types",))
    return spec


def _heads(f: ConfigFields, family: _Family, hidden: int) -> tuple[int, int, int]:
    """h_q, h_kv, d."""
    heads = f.integer("num_attention_heads", 32)
    kv_heads = reading.key_value_heads(f, heads, family.kv_heads)
    head_dim = f.optional_integer("head_dim", family.head_dim, low=2)
    if head_dim is None:
        head_dim = hidden // heads
        f.record("head_dim", head_dim, "derived: hidden_size / num_attention_heads")
    if head_dim % 2:
        raise refuse("head_dim", head_dim, "rotary needs pairs", "Write an even head_dim")
    return heads, kv_heads, head_dim
