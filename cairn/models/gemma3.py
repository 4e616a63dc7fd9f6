"""Gemma 3: its config.json as a ModelSpec. Window layers between full ones, text only.

A folder with a vision encoder has the fields of the text model in `text_config`. Tensors of the
vision encoder are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.models import fields as reading
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, refuse
from cairn.models.rope import attention_rope
from cairn.specs.ffn import DenseFfn
from cairn.specs.gqa import GqaSpec
from cairn.specs.model import BlockNames, LayerSpec, ModelSpec, NormSpec
from cairn.specs.rotary import RotarySpec

FAMILIES = ("gemma3", "gemma3_text")
WITH_VISION = "gemma3"
WINDOW, FULL = "sliding_attention", "full_attention"
VISION = r"(^|\.)(vision_tower|multi_modal_projector)\."
REPEATED_HEAD = r"^language_model\.lm_head\.weight$"
NAMES = BlockNames(
    ffn_norm="pre_feedforward_layernorm",
    mixer_out_norm="post_attention_layernorm",
    ffn_out_norm="post_feedforward_layernorm",
)
THETAS = {WINDOW: ("rope_local_base_freq", 10000.0), FULL: ("rope_theta", 1e6)}
"""Field and default of the base of the frequencies by kind of layer."""
WITHOUT_EFFECT = (
    "layer_types sliding_window_pattern _sliding_window_pattern cache_implementation "
    "mm_tokens_per_image boi_token_index eoi_token_index image_token_index "
    "rope_local_base_freq rope_theta rope_scaling rope_parameters"
).split()


def spec_from_config(
    config: Mapping[str, Any], overridden: frozenset[str], stored: StoredRows
) -> ModelSpec:
    """Map a config.json with a model_type of `FAMILIES`.

    Args:
        config: the parsed file, overrides merged in.
        overridden: keys that an override set.
        stored: row counts of the weight files, and how names of their tensors begin.

    Raises:
        BadModel: a field is of the wrong type, contradicts another or is not supported.
    """
    model_type = str(config["model_type"])
    nested = model_type == WITH_VISION
    if nested:
        config = _text_config(config, overridden)
    f = ConfigFields(config, {name: "override" for name in overridden})
    reading.refuse_quantized(config)
    reading.activation_only(f, "hidden_activation", "gelu_pytorch_tanh")
    _refuse_other_forms(f)
    vocab, hidden = f.integer("vocab_size", 262208), f.integer("hidden_size", 2304)
    norm = NormSpec(f.number("rms_norm_eps", 1e-6), unit_offset=True)
    ffn = DenseFfn(f.integer("intermediate_size", 9216), "gelu_tanh")
    mixers = _attention(f, norm.eps)
    max_positions = f.integer("max_position_embeddings", 131072)
    if nested:
        f.record("vision_config", None, "derived: text alone is served, images are not")
    spec = ModelSpec(
        architecture=model_type,
        hidden_size=hidden,
        norm=norm,
        chunk_size=None,
        landmarks=False,
        max_model_len=max_positions,
        layers=tuple(
            LayerSpec(mixers[kind], ffn, norm, NAMES)
            for kind in _kinds(f, f.integer("num_hidden_layers", 26))
        ),
        embedding_scale=hidden**0.5,
        prefix=stored.prefix or ("model.language_model." if nested else "model."),
        ignored=(VISION, REPEATED_HEAD) if nested else (),
        resolved=f.resolved(),
        **reading.vocabulary_fields(config, vocab, f.flag("tie_word_embeddings", True), stored),
    )
    f.warn_unknown(WITHOUT_EFFECT)
    return spec


def _text_config(config: Mapping[str, Any], overridden: frozenset[str]) -> dict[str, Any]:
    """The fields of the text model; overrides and special tokens at the top level take
    precedence."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise refuse(
            "text_config", text, "not an object", "Write model_type gemma3_text without it"
        )
    outer = {"eos_token_id", "bos_token_id", "dtype", "torch_dtype", "quantization_config"}
    flat = {name: v for name, v in config.items() if name not in ("text_config", "vision_config")}
    kept = {n: v for n, v in flat.items() if n in overridden or (n in outer and v is not None)}
    return flat | text | kept


def _refuse_other_forms(f: ConfigFields) -> None:
    """Refuse score and logit caps, which no release of Gemma 3 has, and bidirectional attention."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = f.config.get(name)
        if value is not None:
            raise refuse(name, value, "capped scores are not supported", f"Write null for {name}")
        f.record(name, None, f.source(name))
    if f.flag("use_bidirectional_attention", False):
        name = "use_bidirectional_attention"
        raise refuse(name, True, "an encoder's attention is not supported", "Use a decoder")


def _attention(f: ConfigFields, eps: float) -> dict[str, GqaSpec]:
    """The attention of a window layer and of a full one."""
    heads = f.integer("num_attention_heads", 8)
    kv_heads = reading.key_value_heads(f, heads, 4)
    head_dim = f.integer("head_dim", 256, low=2)
    scale = f.number("query_pre_attn_scalar", 256.0) ** -0.5
    window = f.integer("sliding_window", 4096)
    bias = f.flag("attention_bias", False)
    return {
        kind: GqaSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary=_rotary(f, kind, head_dim),
            window=window if kind == WINDOW else None,
            scale=scale,
            qk_norm="head",
            qk_eps=eps,
            unit_offset=True,
            bias=bias,
            out_bias=bias,
        )
        for kind in (WINDOW, FULL)
    }


def _rotary(f: ConfigFields, kind: str, head_dim: int) -> RotarySpec:
    """The rotation of a kind of layer: `rope_parameters` has an object for each kind; older files
    have a base for each, and a scaling of full layers."""
    field, theta = THETAS[kind]
    by_kind = f.config.get("rope_parameters")
    if isinstance(by_kind, dict) and kind in by_kind:
        own: dict[str, Any] = {"rope_parameters": by_kind[kind]}
    else:
        own = {"rope_theta": f.number(field, theta)}
        if kind == FULL:
            own["rope_scaling"] = f.config.get("rope_scaling")
    # The trained length (1) is not used: scalings that need it have
    # original_max_position_embeddings here.
    rotary, _ = attention_rope(ConfigFields(own), head_dim, theta, 1)
    f.record(f"rotary of {kind}", rotary.theta, "derived: rope_parameters, or rope_theta")
    return rotary


def _kinds(f: ConfigFields, count: int) -> list[str]:
    """Kind of each layer: from `layer_types`, or full attention at a fixed interval."""
    kinds = f.layer_types(count, (WINDOW, FULL))
    if kinds is not None:
        return kinds
    every = f.integer("sliding_window_pattern", 6)
    return [WINDOW if (i + 1) % every else FULL for i in range(count)]
