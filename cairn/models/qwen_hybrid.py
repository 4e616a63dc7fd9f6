"""Qwen3-Next and Qwen3.5: gated delta nets between layers of gated full attention.

A folder with a vision encoder has the fields of the text model in `text_config`, those of the
encoder in `vision_config`. Tensors of the draft layer are read where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cairn.models import fields as reading
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, refuse
from cairn.models.quantization import quantization_of
from cairn.models.qwen3_moe import experts_of, refuse_windows, sparse_layers
from cairn.models.vision.config import vision_spec
from cairn.specs.ffn import DenseFfn, FfnSpec
from cairn.specs.gated_delta import GatedDeltaSpec
from cairn.specs.gqa import GqaSpec
from cairn.specs.model import BlockNames, DraftSpec, LayerSpec, ModelSpec, NormSpec
from cairn.specs.rotary import RotarySpec

LINEAR, FULL = "linear_attention", "full_attention"
DRAFT_HEAD, VISION = r"^mtp\.", r"^model\.visual\."
SECTIONS = (11, 11, 10)
"""Pairs of each axis by default: time, height, width."""
NESTED = ("text_config", "vision_config")
OUTER = frozenset(
    "tie_word_embeddings dtype torch_dtype quantization_config bos_token_id eos_token_id "
    "image_token_id video_token_id vision_start_token_id vision_end_token_id".split()
)
"""Fields that a nested config has beside `text_config`; they take precedence over fields of the
same name inside."""
WITHOUT_EFFECT = (
    "attn_output_gate output_gate_type mamba_ssm_dtype "
    "mtp_use_dedicated_embeddings router_aux_loss_coef output_router_logits sliding_window "
    "max_window_layers image_token_id video_token_id vision_start_token_id vision_end_token_id "
    "layer_types full_attention_interval"
).split()


@dataclass(frozen=True)
class _Family:
    """Defaults and properties of a family.

    Attributes:
        vocab, hidden, intermediate, layers, kv_heads: of the fields of these meanings.
        experts, active: default numbers of experts; 0: its feed-forward parts are dense.
        grouped: projections of delta nets are grouped by key head, and fields say which layers
            have experts and whether their weights are divided by their sum; else all have and are.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    kv_heads: int
    experts: int = 0
    active: int = 0
    grouped: bool = False


DENSE_35 = _Family(248320, 4096, 12288, 32, 4)
SPARSE_35 = _Family(248320, 2048, 0, 40, 2, experts=256, active=8)
FAMILIES = {
    "qwen3_next": _Family(151936, 2048, 5632, 48, 2, experts=512, active=10, grouped=True),
    "qwen3_5": DENSE_35,
    "qwen3_5_text": DENSE_35,
    "qwen3_5_moe": SPARSE_35,
    "qwen3_5_moe_text": SPARSE_35,
}
WITH_VISION = ("qwen3_5", "qwen3_5_moe")


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
    family, nested = FAMILIES[model_type], model_type in WITH_VISION
    whole = config
    if nested:
        config = _text_config(config, overridden)
    f = ConfigFields(config, {name: "override" for name in overridden})
    quantization = quantization_of(f)
    reading.activation_only(f)
    refuse_windows(f)
    _check_gate(f)
    vocab, hidden = f.integer("vocab_size", family.vocab), f.integer("hidden_size", family.hidden)
    eps, tied = f.number("rms_norm_eps", 1e-6), f.flag("tie_word_embeddings", False)
    max_positions = f.integer("max_position_embeddings", 32768)
    count, norm = f.integer("num_hidden_layers", family.layers), NormSpec(eps, unit_offset=True)
    attention, delta = _attention(f, family, eps), _delta_net(f, family, eps)
    ffns = _feed_forward(f, family, count)
    layers = tuple(
        LayerSpec(attention, ffn, norm)
        if kind == FULL
        else LayerSpec(delta, ffn, norm, names=BlockNames(mixer="linear_attn"))
        for kind, ffn in zip(_kinds(f, count), ffns, strict=True)
    )
    seeing = nested and whole.get("vision_config") is not None
    if nested:
        told = "images and videos are read" if seeing else "text alone is read"
        f.record("vision_config", told, "config" if seeing else "default")
    spec = ModelSpec(
        architecture=model_type,
        hidden_size=hidden,
        norm=norm,
        chunk_size=None,
        landmarks=False,
        max_model_len=max_positions,
        layers=layers,
        draft_layer=_draft(f, replace(attention, draft_width=hidden), ffns[-1], norm),
        prefix="model.language_model." if nested else "model.",
        ignored=(DRAFT_HEAD, VISION) if nested and not seeing else (DRAFT_HEAD,),
        vision=vision_spec(whole, hidden) if seeing else None,
        quantization=quantization,
        resolved=f.resolved(),
        **reading.vocabulary_fields(config, vocab, tied, stored),
    )
    f.warn_unknown(WITHOUT_EFFECT)
    return spec


def _text_config(config: Mapping[str, Any], overridden: frozenset[str]) -> dict[str, Any]:
    """The fields of the text model, including those at the top level."""
    text, outer = config.get("text_config"), config["model_type"]
    if not isinstance(text, dict):
        raise refuse(
            "text_config",
            text,
            f"not an object, which {outer} has",
            f"Write text_config, or model_type {outer}_text for a config without vision",
        )
    if text.get("model_type", outer) not in (outer, f"{outer}_text"):
        raise refuse(
            "text_config.model_type",
            text["model_type"],
            f"model_type is {outer}",
            f"Write {outer}_text",
        )
    flat = {**config, **text}
    for name, value in config.items():
        if name in overridden or (name in OUTER and value is not None):
            flat[name] = value
    return {name: value for name, value in flat.items() if name not in NESTED}


def _kinds(f: ConfigFields, count: int) -> list[str]:
    """Kind of each layer: from `layer_types`, or full attention at a fixed interval."""
    kinds = f.layer_types(count, (LINEAR, FULL))
    if kinds is not None:
        return kinds
    interval = f.integer("full_attention_interval", 4)
    return [LINEAR if (i + 1) % interval else FULL for i in range(count)]


def _attention(f: ConfigFields, family: _Family, eps: float) -> GqaSpec:
    """Full attention with gates."""
    heads = f.integer("num_attention_heads", 16)
    kv_heads = reading.key_value_heads(f, heads, family.kv_heads)
    head_dim, theta = f.integer("head_dim", 256, low=2), reading.rope_theta(f)
    rotated = reading.rotated_dims(f, head_dim, 0.25)
    sections = _sections(f)
    bias = f.flag("attention_bias", False)
    return GqaSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=RotarySpec("standard", rotated, theta, rounded=True, sections=sections),
        qk_norm="head",
        qk_eps=eps,
        unit_offset=True,
        bias=bias,
        out_bias=bias,
        output_gate=True,
    )


def _delta_net(f: ConfigFields, family: _Family, eps: float) -> GatedDeltaSpec:
    """The recurrent layers."""
    key_heads = f.integer("linear_num_key_heads", 16)
    value_heads = f.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise refuse(
            "linear_num_value_heads",
            value_heads,
            f"{key_heads} key heads (linear_num_key_heads) cannot share them evenly",
            "Write a multiple of linear_num_key_heads",
        )
    return GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=f.integer("linear_key_head_dim", 128),
        value_dim=f.integer("linear_value_head_dim", 128),
        conv_kernel=f.integer("linear_conv_kernel_dim", 4),
        eps=eps,
        grouped=family.grouped,
    )


def _feed_forward(f: ConfigFields, family: _Family, count: int) -> list[FfnSpec]:
    """The feed-forward part of each layer."""
    if not family.experts:
        return [DenseFfn(f.integer("intermediate_size", family.intermediate))] * count
    experts = f.integer("num_experts", family.experts, low=0 if family.grouped else 1)
    renormalize = True if family.grouped else None
    sparse = None
    if experts:
        sparse = experts_of(
            f, experts, active=family.active, width=512, renormalize=renormalize, shared=512
        )
    if family.grouped:
        return sparse_layers(f, count, sparse, family.intermediate)
    for name in ("decoder_sparse_step", "mlp_only_layers", "intermediate_size"):
        if f.written(name):
            f.record(name, None, "derived: every layer of this family has experts")
    assert sparse is not None
    return [sparse] * count


def _draft(f: ConfigFields, attention: GqaSpec, ffn: FfnSpec, norm: NormSpec) -> DraftSpec | None:
    """The draft layer: full attention, and the feed-forward part of the last layer. Older files
    have its tensors without the field."""
    if f.integer("mtp_num_hidden_layers", 1, low=0) != 1:
        return None
    return DraftSpec(LayerSpec(attention, ffn, norm), "mtp.", normed=True)


def _check_gate(f: ConfigFields) -> None:
    """Refuse attention without gates. `output_gate_type` says nothing: the gate is a sigmoid."""
    if not f.flag("attn_output_gate", True):
        raise refuse(
            "attn_output_gate",
            False,
            "attention without gates is not supported in this family",
            "Write attn_output_gate: true",
        )


def _sections(f: ConfigFields) -> tuple[int, ...]:
    """Pairs that turn by each axis of images. A text's positions are the same on all axes, so they
    change nothing there."""
    found = SECTIONS
    for name in ("rope_scaling", "rope_parameters"):
        rope = f.config.get(name)
        if not isinstance(rope, dict):
            continue
        if rope.get("mrope_interleaved", True) is not True:
            raise refuse(
                f"{name}.mrope_interleaved",
                rope["mrope_interleaved"],
                "axes in blocks are not supported",
                "Write mrope_interleaved: true",
            )
        section = rope.get("mrope_section")
        counts = isinstance(section, list) and len(section) == 3
        if section is not None and not (counts and all(type(n) is int and n >= 0 for n in section)):
            raise refuse(
                f"{name}.mrope_section",
                section,
                "not three numbers of frequencies",
                "Write one number each for time, height and width",
            )
        found = found if section is None else tuple(section)
    return found
