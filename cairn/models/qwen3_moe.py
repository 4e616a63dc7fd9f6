"""Qwen3 with experts: its config.json as a ModelSpec. Full causal layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.models import fields as reading
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, refuse
from cairn.models.quantization import quantization_of
from cairn.models.rope import attention_rope
from cairn.specs.ffn import DenseFfn, FfnSpec, MoeFfn, RouterSpec
from cairn.specs.gqa import GqaSpec
from cairn.specs.model import LayerSpec, ModelSpec, NormSpec

WITHOUT_EFFECT = ("router_aux_loss_coef", "output_router_logits", "sliding_window",
                  "max_window_layers", "layer_types")  # fmt: skip


def spec_from_config(
    config: Mapping[str, Any], overridden: frozenset[str], stored: StoredRows
) -> ModelSpec:
    """Map a config.json with model_type qwen3_moe.

    Args:
        config: the parsed file, overrides merged in.
        overridden: keys that an override set.
        stored: row counts of the weight files; they win over `vocab_size`.

    Raises:
        BadModel: a field is of the wrong type, contradicts another or is not supported.
    """
    f = ConfigFields(config, {name: "override" for name in overridden})
    quantization = quantization_of(f)
    reading.activation_only(f)
    refuse_windows(f)
    vocab, hidden = f.integer("vocab_size", 151936), f.integer("hidden_size", 2048)
    eps, tied = f.number("rms_norm_eps", 1e-6), f.flag("tie_word_embeddings", False)
    max_positions = f.integer("max_position_embeddings", 32768)
    heads = f.integer("num_attention_heads", 32)
    kv_heads = reading.key_value_heads(f, heads, 4)
    head_dim = f.optional_integer("head_dim", None, low=2)
    if head_dim is None:
        head_dim = hidden // heads
        f.record("head_dim", head_dim, "derived: hidden_size / num_attention_heads")
    rotary, longest = attention_rope(f, head_dim, 10000.0, max_positions)
    bias = f.flag("attention_bias", False)
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        qk_norm="head",
        qk_eps=eps,
        bias=bias,
        out_bias=bias,
    )
    count, norm = f.integer("num_hidden_layers", 24), NormSpec(eps)
    f.layer_types(count, ("full_attention",))
    experts = f.integer("num_experts", 128, low=0)
    ffn = experts_of(f, experts, active=8, width=768, renormalize=False) if experts else None
    ffns = sparse_layers(f, count, ffn, dense_width=6144)
    spec = ModelSpec(
        architecture="qwen3_moe",
        hidden_size=hidden,
        norm=norm,
        chunk_size=None,
        landmarks=False,
        max_model_len=longest,
        layers=tuple(LayerSpec(attention, ffn, norm) for ffn in ffns),
        quantization=quantization,
        resolved=f.resolved(),
        **reading.vocabulary_fields(config, vocab, tied, stored),
    )
    f.warn_unknown(WITHOUT_EFFECT)
    return spec


def refuse_windows(f: ConfigFields) -> None:
    """Refuse window attention, which no release of these families has."""
    if f.flag("use_sliding_window", False):
        raise refuse(
            "use_sliding_window",
            True,
            "window attention is not supported in this family",
            "Write use_sliding_window: false",
        )


def experts_of(
    f: ConfigFields,
    experts: int,
    *,
    active: int,
    width: int,
    renormalize: bool | None,
    shared: int | None = None,
) -> MoeFfn:
    """The mixture of experts; numbers are defaults.

    Args:
        f: the config.
        experts: number of experts.
        active: experts a token.
        width: inside an expert.
        renormalize: of the field `norm_topk_prob`; None: always, whatever the field says.
        shared: width inside the shared expert; None: there is none.
    """
    chosen = f.integer("num_experts_per_tok", active)
    if chosen > experts:
        raise refuse(
            "num_experts_per_tok",
            chosen,
            f"there are {experts} experts (num_experts)",
            "Write at most as many as there are experts",
        )
    width = f.integer("moe_intermediate_size", width)
    renormalized = True if renormalize is None else f.flag("norm_topk_prob", renormalize)
    if renormalize is None:
        f.record("norm_topk_prob", True, "derived: always on in this family")
    if shared is not None:
        shared = f.integer("shared_expert_intermediate_size", shared)
    return MoeFfn(
        experts=experts,
        active=chosen,
        intermediate=width,
        router=RouterSpec("softmax", renormalized),
        shared=shared or 0,
        shared_gate=shared is not None,
    )


def sparse_layers(
    f: ConfigFields, count: int, experts: MoeFfn | None, dense_width: int
) -> list[FfnSpec]:
    """The feed-forward part of each layer: experts in every `decoder_sparse_step`-th one that
    `mlp_only_layers` does not name, if there are experts, else dense.

    Args:
        f: the config.
        count: number of layers.
        experts: the mixture; None: there are no experts.
        dense_width: default of `intermediate_size`.
    """
    step, dense = f.integer("decoder_sparse_step", 1), f.config.get("mlp_only_layers") or []
    numbers = isinstance(dense, list) and all(type(i) is int for i in dense)
    if not numbers or any(not 0 <= i < count for i in dense):
        raise refuse(
            "mlp_only_layers",
            dense,
            f"not a list of layers 0 to {count - 1}",
            "Write a list of layer numbers",
        )
    f.record("mlp_only_layers", dense, f.source("mlp_only_layers"))
    plain = DenseFfn(f.integer("intermediate_size", dense_width))
    return [
        plain if experts is None or i in dense or (i + 1) % step else experts for i in range(count)
    ]
