"""DeepSeek-V4: compressed attention, hyper-connections (several residual streams), and experts
chosen by token ids in the first layers.

Its config.json (model_type deepseek_v4) as a ModelSpec. Defaults are those of V4-Flash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cairn.models import fields as reading
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, refuse
from cairn.models.quantization import FIELD, quantization_of
from cairn.models.rope import two_ropes
from cairn.specs.compressed import CompressedSpec, CompressionSpec
from cairn.specs.ffn import FfnNames, MoeFfn, RouterSpec
from cairn.specs.model import (
    BlockNames,
    DraftNames,
    DraftSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    StreamsSpec,
)
from cairn.specs.quantization import QuantizationSpec

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
KINDS = (SLIDING, SPARSE, HEAVY)
RATES = {SPARSE: 4, HEAVY: 128}
HASHED, ROUTED = "hash_moe", "moe"
MAX_SELECTED = 4096
"""Most entries of a selection."""
BLOCK_NAMES = BlockNames("attn", "ffn", "attn_norm", "ffn_norm")
EXPERT_NAMES = FfnNames("w1", "w3", "w2")
DRAFT_NAMES = DraftNames(("e_proj", "h_proj"), "enorm", "hnorm", layer="")
WITHOUT_EFFECT = (
    "norm_topk_prob",
    "ep_size",
    "aux_loss_alpha",
    "seq_aux",
    "router_aux_loss_coef",
    "router_jitter_noise",
)
"""Weights of experts are always divided by their sum."""


def spec_from_config(
    config: Mapping[str, Any], overridden: frozenset[str], stored: StoredRows
) -> ModelSpec:
    """Map a config.json with model_type deepseek_v4.

    Args:
        config: the parsed file, overrides merged in.
        overridden: keys that an override set.
        stored: row counts of the weight files; they win over `vocab_size`.

    Raises:
        BadModel: a field is of the wrong type, contradicts another or is not supported.
    """
    f = ConfigFields(config, {name: "override" for name in overridden})
    reading.activation_only(f)
    vocab, hidden = f.integer("vocab_size", 129280), f.integer("hidden_size", 4096)
    count = f.integer("num_hidden_layers", 43)
    max_positions = f.integer("max_position_embeddings", 1 << 20)
    eps, tied = f.number("rms_norm_eps", 1e-6), f.flag("tie_word_embeddings", False)
    norm, streams = NormSpec(eps), _streams(f, eps)
    mixers, sliding = _mixers(f, count, max_positions, eps)
    ffns, routed = _ffns(f, count, vocab)
    drafting = replace(sliding, draft_width=streams.count * hidden)
    spec = ModelSpec(
        architecture="deepseek_v4",
        hidden_size=hidden,
        norm=norm,
        chunk_size=None,
        landmarks=False,
        max_model_len=max_positions,
        layers=tuple(
            LayerSpec(mixer, ffn, norm, BLOCK_NAMES, streams)
            for mixer, ffn in zip(mixers, ffns, strict=True)
        ),
        quantization=_quantization(f),
        prefix="",
        table="embed",
        head="head",
        streams=streams,
        draft_layer=_draft(f, count, LayerSpec(drafting, routed, norm, BLOCK_NAMES, streams)),
        ignored=(r"^mtp\.",),
        resolved=f.resolved(),
        **reading.vocabulary_fields(config, vocab, tied, stored),
    )
    f.warn_unknown(WITHOUT_EFFECT)
    return spec


def _streams(f: ConfigFields, norm_eps: float) -> StreamsSpec:
    """Residual streams."""
    return StreamsSpec(
        count=f.integer("hc_mult", 4),
        norm_eps=norm_eps,
        eps=f.number("hc_eps", 1e-6),
        iterations=f.integer("hc_sinkhorn_iters", 20),
    )


def _draft(f: ConfigFields, count: int, layer: LayerSpec) -> DraftSpec | None:
    """The draft layer `mtp.0`, whose rate follows those of the layers. Only a rate of 0 is
    supported, which both published models have: a window without entries."""
    drafts, ratios = (
        f.integer("num_nextn_predict_layers", 1, low=0),
        f.config.get("compress_ratios"),
    )
    rate = ratios[count] if isinstance(ratios, list) and len(ratios) > count else 0
    if drafts != 1 or rate:
        return None
    return DraftSpec(layer, "mtp.0.", normed=False, names=DRAFT_NAMES)


def _mixers(
    f: ConfigFields, count: int, max_positions: int, eps: float
) -> tuple[list[CompressedSpec], CompressedSpec]:
    """Attention of each layer, and of a layer with a window only."""
    heads, dim = f.integer("num_attention_heads", 64), f.integer("head_dim", 512)
    _only(f, "num_key_value_heads", 1, "all heads share one record")
    _only(f, "attention_bias", False, "projections have no bias")
    rope = _rotated(f, dim)
    groups = f.integer("o_groups", 8)
    if heads % groups:
        raise refuse("o_groups", groups, f"{heads} heads do not fill them", "Write a divisor")
    main, compressed = two_ropes(f, rope, (10000.0, 160000.0), max_positions)
    rates = _rates(f, count)
    sliding = CompressedSpec(
        num_heads=heads,
        head_dim=dim,
        q_lora_rank=f.integer("q_lora_rank", 1024),
        out_groups=groups,
        out_rank=f.integer("o_lora_rank", 1024),
        rotary=main,
        window=f.integer("sliding_window", 128),
        eps=eps,
    )
    by_kind = {SLIDING: sliding}
    for kind in {kind for kind, _ in rates} - {SLIDING}:
        by_kind[kind] = replace(sliding, rotary=compressed)
    selected = _selection(f, rope) if any(kind == SPARSE for kind, _ in rates) else {}
    mixers = [
        by_kind[kind]
        if kind == SLIDING
        else replace(by_kind[kind], compression=_compression(kind, rate, selected))
        for kind, rate in rates
    ]
    return mixers, sliding


def _compression(kind: str, rate: int, selected: Mapping[str, int]) -> CompressionSpec:
    """Of a layer with entries."""
    return (
        CompressionSpec(rate, True, **selected) if kind == SPARSE else CompressionSpec(rate, False)
    )


def _selection(f: ConfigFields, rope: int) -> dict[str, int]:
    """The indexer, as fields of `CompressionSpec`."""
    dim, topk = f.integer("index_head_dim", 128), f.integer("index_topk", 512)
    if dim < rope:
        raise refuse(
            "index_head_dim",
            dim,
            f"its last {rope} dimensions (qk_rope_head_dim) are rotated",
            f"Write at least {rope}",
        )
    if topk > MAX_SELECTED:
        raise refuse(
            "index_topk", topk, "too many for a selection", f"Write at most {MAX_SELECTED}"
        )
    return {"index_heads": f.integer("index_n_heads", 64), "index_dim": dim, "topk": topk}


def _rotated(f: ConfigFields, dim: int) -> int:
    """Dimensions of a head that are rotated."""
    if f.written("qk_rope_head_dim") or not f.written("partial_rotary_factor"):
        rope = f.integer("qk_rope_head_dim", dim // 8, low=2)
    else:
        rope = reading.rotated_dims(f, dim, 0.125)
    if rope % 2 or rope > dim:
        raise refuse(
            "qk_rope_head_dim", rope, f"not pairs of {dim} dimensions", "Write an even number"
        )
    return rope


def _rates(f: ConfigFields, count: int) -> list[tuple[str, int]]:
    """Kind and rate of each layer, by `layer_types` or else by `compress_ratios`."""
    kinds = f.layer_types(count, KINDS)
    if kinds is not None:
        if f.written("compress_ratios"):
            f.record("compress_ratios", f.config["compress_ratios"], "config, without effect")
        rates = _compress_rates(f)
        return [(kind, rates.get(kind, 0)) for kind in kinds]
    name = "compress_ratios"
    ratios = f.config.get(name)
    if ratios is None:
        raise refuse(
            name, None, "nothing says which kind each layer is", "Write it, or layer_types"
        )
    known = {0: SLIDING, **{rate: kind for kind, rate in RATES.items()}}
    # Those of draft layers may follow.
    if not isinstance(ratios, list) or len(ratios) < count:
        raise refuse(name, ratios, f"not one entry for each of {count} layers", "Write them")
    for ratio in ratios:
        if isinstance(ratio, bool) or ratio not in known:
            raise refuse(name, ratio, "an unknown rate", f"Known: {', '.join(map(str, known))}")
    f.record(name, ratios, f.source(name))
    return [(known[ratio], ratio) for ratio in ratios[:count]]


def _compress_rates(f: ConfigFields) -> dict[str, int]:
    """Tokens per entry, by kind of layer."""
    name, value = "compress_rates", f.config.get("compress_rates")
    if value is None:
        f.record(name, RATES, "default")
        return RATES
    if not isinstance(value, dict) or not set(value) <= {SPARSE, HEAVY}:
        raise refuse(name, value, "not a rate by kind of layer", f"Known: {SPARSE}, {HEAVY}")
    nested = ConfigFields({f"{name}.{kind}": rate for kind, rate in value.items()})
    rates = {kind: nested.integer(f"{name}.{kind}", RATES[kind]) for kind in RATES}
    f.record(name, rates, f.source(name))
    return rates


def _ffns(f: ConfigFields, count: int, vocab: int) -> tuple[list[MoeFfn], MoeFfn]:
    """The experts of each layer, and of one that chooses them by their scores."""
    for name, only in (
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("n_shared_experts", 1),
    ):
        _only(f, name, only, "not supported")
    for name in ("n_group", "topk_group"):
        if f.config.get(name) is not None:
            _only(f, name, 1, "experts of this model have no groups")
    experts, active = f.integer("n_routed_experts", 256), f.integer("num_experts_per_tok", 6)
    if active > experts:
        raise refuse(
            "num_experts_per_tok",
            active,
            f"there are {experts} experts (n_routed_experts)",
            "Write at most as many as there are experts",
        )
    width = f.integer("moe_intermediate_size", 2048)
    limit = f.config.get("swiglu_limit") and f.number("swiglu_limit", 10.0)
    router = RouterSpec(
        score="sqrtsoftplus",
        renormalize=True,
        scale=f.number("routed_scaling_factor", 1.5),
        bias=True,
        bias_name="gate.bias",
    )
    routed = MoeFfn(
        experts=experts,
        active=active,
        intermediate=width,
        router=router,
        shared=width,
        shared_name="shared_experts",
        limit=limit or 0.0,
        names=EXPERT_NAMES,
    )
    hashed = replace(routed, router=replace(router, bias=False, table_rows=vocab))
    return [hashed if kind == HASHED else routed for kind in _expert_kinds(f, count)], routed


def _expert_kinds(f: ConfigFields, count: int) -> list[str]:
    """HASHED or ROUTED, by layer."""
    name, kinds = "mlp_layer_types", f.config.get("mlp_layer_types")
    if kinds is None:
        first = f.integer("num_hash_layers", 3, low=0)
        return [HASHED if i < first else ROUTED for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise refuse(name, kinds, f"not a list of {count} entries", "Write one entry per layer")
    for kind in kinds:
        if kind not in (HASHED, ROUTED):
            raise refuse(name, kind, "an unknown kind of layer", f"Known: {HASHED}, {ROUTED}")
    f.record(name, kinds, f.source(name))
    if f.written("num_hash_layers"):
        f.record("num_hash_layers", f.config["num_hash_layers"], "config, without effect")
    return kinds


def _quantization(f: ConfigFields) -> QuantizationSpec | None:
    """How matrices are stored: scales are beside them as `.scale`, experts in fp4 or in blocks."""
    found = quantization_of(f)
    kind = f.config.get("expert_dtype", "fp4")
    if kind not in ("fp4", "fp8", None):
        raise refuse("expert_dtype", kind, "experts of this format are not supported", "fp4 or fp8")
    f.record("expert_dtype", kind, f.source("expert_dtype"))
    if found is None:
        return None
    if found.scheme != "fp8_block":
        raise refuse(
            FIELD, f.config[FIELD].get("quant_method"), "not fp8 in blocks", "Only that is"
        )
    return replace(found, scale_name="scale", experts="fp4" if kind == "fp4" else "block")


def _only(f: ConfigFields, name: str, only: object, why: str) -> None:
    """Refuse any other value of a field."""
    value = f.config.get(name, only)
    if value != only:
        raise refuse(name, value, why, f"Only {only!r} is supported")
    f.record(name, value, f.source(name))
