"""DeepSeek-V3.2 and GLM-5: latent attention with an indexer, and mixtures of experts.

Their config.json (model_type deepseek_v32, glm_moe_dsa) as a ModelSpec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cairn.models import fields as reading
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, refuse
from cairn.models.quantization import quantization_of
from cairn.models.rope import latent_rope
from cairn.specs.ffn import DenseFfn, FfnSpec, MoeFfn, RouterSpec
from cairn.specs.mla import IndexerSpec, MlaSpec
from cairn.specs.model import DraftNames, DraftSpec, LayerSpec, ModelSpec, NormSpec

LATENT_EPS = 1e-6
"""Eps of the norms of latents and of index keys; rms_norm_eps does not apply to them."""
MAX_SELECTED = 4096
"""Most tokens of a selection."""
FULL, SHARED = "full", "shared"
SELECTIONS = {FULL: FULL, SHARED: SHARED}
SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
"""Fields that say which layers select. Ignored if all do."""
WITHOUT_EFFECT = ("ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "layer_types")


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of a model_type: the published model's."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    nope_dim: int
    value_dim: int
    index_heads: int
    index_interleave: bool
    theta: float
    eps: float
    intermediate: int
    groups: int
    top_groups: int
    max_positions: int
    shares: bool


FAMILIES = {
    "deepseek_v32": _Family(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        q_lora_rank=1536,
        nope_dim=128,
        value_dim=128,
        index_heads=64,
        index_interleave=False,
        theta=10000.0,
        eps=1e-6,
        intermediate=18432,
        groups=8,
        top_groups=4,
        max_positions=163840,
        shares=False,
    ),
    "glm_moe_dsa": _Family(
        vocab_size=154880,
        hidden_size=6144,
        num_layers=78,
        num_heads=64,
        q_lora_rank=2048,
        nope_dim=192,
        value_dim=256,
        index_heads=32,
        index_interleave=True,
        theta=1e6,
        eps=1e-5,
        intermediate=12288,
        groups=1,
        top_groups=1,
        max_positions=202752,
        shares=True,
    ),
}


def spec_from_config(
    config: Mapping[str, Any], overridden: frozenset[str], stored: StoredRows
) -> ModelSpec:
    """Map a config.json of one of these families.

    Args:
        config: the parsed file, overrides merged in.
        overridden: keys that an override set.
        stored: row counts of the weight files; they win over `vocab_size`.

    Raises:
        BadModel: a field is of the wrong type, contradicts another or is not supported.
    """
    f = ConfigFields(config, {name: "override" for name in overridden})
    own = FAMILIES[config["model_type"]]
    reading.activation_only(f)
    quantization = quantization_of(f)
    vocab = f.integer("vocab_size", own.vocab_size)
    hidden = f.integer("hidden_size", own.hidden_size)
    num_layers = f.integer("num_hidden_layers", own.num_layers)
    drafts = f.integer("num_nextn_predict_layers", 1, low=0)
    max_positions = f.integer("max_position_embeddings", own.max_positions)
    eps = f.number("rms_norm_eps", own.eps)
    tied = f.flag("tie_word_embeddings", False)
    norm = NormSpec(eps)
    kinds = _selections(f, num_layers, drafts) if own.shares else [FULL] * num_layers
    full, shared = _mixers(f, own, max_positions)
    ffns = _ffns(f, own, num_layers, drafts)
    spec = ModelSpec(
        architecture=config["model_type"],
        hidden_size=hidden,
        norm=norm,
        chunk_size=None,
        landmarks=False,
        max_model_len=max_positions,
        layers=tuple(
            LayerSpec(full if kind == FULL else shared, ffn, norm)
            for kind, ffn in zip(kinds, ffns, strict=True)
        ),
        draft_layer=_draft(full, ffns[-1], norm, num_layers, hidden) if drafts == 1 else None,
        quantization=quantization,
        ignored=_ignored(num_layers, drafts),
        resolved=f.resolved(),
        **reading.vocabulary_fields(config, vocab, tied, stored),
    )
    f.warn_unknown((*WITHOUT_EFFECT, *SHARING))
    return spec


def _mixers(f: ConfigFields, own: _Family, max_positions: int) -> tuple[MlaSpec, MlaSpec]:
    """Attention of a layer with an indexer, and of one that shares a selection."""
    heads = f.integer("num_attention_heads", own.num_heads)
    if f.config.get("q_lora_rank", 0) is None:
        raise refuse(
            "q_lora_rank", None, "the indexer reads the latent of queries", "Write its width"
        )
    q_rank = f.integer("q_lora_rank", own.q_lora_rank)
    rank = f.integer("kv_lora_rank", 512)
    nope, rope = f.integer("qk_nope_head_dim", own.nope_dim), _rope_dim(f)
    value = f.integer("v_head_dim", own.value_dim)
    for name, follows in (
        ("num_key_value_heads", heads),
        ("head_dim", rope),
        ("qk_head_dim", nope + rope),
    ):
        if f.optional_integer(name, follows) not in (None, follows):
            raise refuse(
                name, f.config[name], f"latent attention has {follows}", f"Write {follows} for it"
            )
    interleaved = f.flag("rope_interleave", True)
    rotary, magnitude = latent_rope(f, rope, own.theta, max_positions, interleaved)
    index_heads = f.integer("index_n_heads", own.index_heads)
    index_dim = f.integer("index_head_dim", 128)
    if index_dim < rope:
        raise refuse(
            "index_head_dim",
            index_dim,
            f"its first {rope} dimensions (qk_rope_head_dim) are rotated",
            f"Write at least {rope}",
        )
    topk = f.integer("index_topk", 2048)
    if topk > MAX_SELECTED:
        raise refuse(
            "index_topk", topk, "too many for a selection", f"Write at most {MAX_SELECTED}"
        )
    index_interleaved = f.flag("indexer_rope_interleave", own.index_interleave)
    common: dict[str, Any] = {
        "num_heads": heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": rank,
        "nope_dim": nope,
        "rope_dim": rope,
        "value_dim": value,
        "rotary": rotary,
        "scale": (nope + rope) ** -0.5 * magnitude**2,
        "latent_eps": LATENT_EPS,
        "bias": f.flag("attention_bias", False),
        "topk": topk,
    }
    index_rotary = replace(rotary, interleaved=index_interleaved)
    indexer = IndexerSpec(index_heads, index_dim, index_rotary, LATENT_EPS)
    return MlaSpec(**common, indexer=indexer), MlaSpec(**common)


def _rope_dim(f: ConfigFields) -> int:
    rope = f.integer("qk_rope_head_dim", 64, low=2)
    if rope % 2:
        raise refuse("qk_rope_head_dim", rope, "rotary needs pairs", "Write an even number")
    return rope


def _selections(f: ConfigFields, num_layers: int, drafts: int) -> list[str]:
    """By layer, FULL: it selects tokens itself; SHARED: it reads those of the nearest full layer
    below."""
    count = num_layers, drafts
    if f.config.get("indexer_types") is not None:
        name, kinds = "indexer_types", _by_layer(f, "indexer_types", *count, SELECTIONS)
    elif f.config.get("index_topk_pattern") is not None:
        name, letters = "index_topk_pattern", {"F": FULL, "S": SHARED}
        kinds = _by_layer(f, name, *count, SELECTIONS | letters)
    else:
        name, frequency = "index_skip_topk_offset", f.optional_integer("index_topk_freq", 1) or 1
        offset = f.optional_integer(name, 2, low=0)
        first = 1 if offset is None else offset - 1
        kinds = [SHARED if max(i - first, 0) % frequency else FULL for i in range(num_layers)]
    if kinds[0] != FULL:
        raise refuse(
            name, f.config.get(name), "layer 0 has no layer below", "Let layer 0 select (full)"
        )
    return kinds


def _by_layer(
    f: ConfigFields, name: str, num_layers: int, drafts: int, known: Mapping[str, str]
) -> list[str]:
    """A field with a word for each layer, or a string with a letter for each; draft layers may have
    one too."""
    value = f.config[name]
    if not isinstance(value, list | str) or len(value) not in (num_layers, num_layers + drafts):
        raise refuse(name, value, f"not one entry for each of {num_layers} layers", "Write them")
    for entry in value:
        if not isinstance(entry, str) or entry not in known:
            raise refuse(name, entry, "an unknown kind of layer", f"Known: {', '.join(known)}")
    f.record(name, value, f.source(name))
    return [known[entry] for entry in value[:num_layers]]


def _ffns(f: ConfigFields, own: _Family, num_layers: int, drafts: int) -> list[FfnSpec]:
    """The feed-forward part of each layer."""
    dense = DenseFfn(f.integer("intermediate_size", own.intermediate))
    first = f.integer("first_k_dense_replace", 3, low=0)
    if f.config.get("mlp_layer_types") is not None:
        known = {"dense": "dense", "sparse": "sparse"}
        kinds = _by_layer(f, "mlp_layer_types", num_layers, drafts, known)
    else:
        kinds = ["dense" if i < first else "sparse" for i in range(num_layers)]
    sparse = _experts(f, own) if "sparse" in kinds else dense
    return [dense if kind == "dense" else sparse for kind in kinds]


def _experts(f: ConfigFields, own: _Family) -> MoeFfn:
    """The mixture of experts of a layer."""
    for name, only in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        if f.config.get(name, only) != only:
            raise refuse(name, f.config[name], "not supported", f"Only {only!r} is")
        f.record(name, only, f.source(name))
    experts, active = f.integer("n_routed_experts", 256), f.integer("num_experts_per_tok", 8)
    groups = f.optional_integer("n_group", own.groups) or 1
    top_groups = f.optional_integer("topk_group", own.top_groups) or 1
    width = f.integer("moe_intermediate_size", 2048)
    shared = f.optional_integer("n_shared_experts", 1, low=0) or 0
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise refuse(
            "n_group",
            groups,
            f"{experts} experts (n_routed_experts) do not fill such groups",
            "Write a divisor that leaves two experts a group",
        )
    if top_groups > groups:
        raise refuse(
            "topk_group", top_groups, f"there are {groups} groups", "Write at most n_group"
        )
    if active > experts // groups * top_groups:
        raise refuse(
            "num_experts_per_tok",
            active,
            "more than the experts of topk_group groups",
            f"Write at most {experts // groups * top_groups}",
        )
    router = RouterSpec(
        score="sigmoid",
        renormalize=f.flag("norm_topk_prob", True),
        scale=f.number("routed_scaling_factor", 2.5),
        bias=True,
        groups=groups,
        top_groups=top_groups,
    )
    return MoeFfn(
        experts=experts,
        active=active,
        intermediate=width,
        router=router,
        shared=shared * width,
        shared_name="shared_experts",
    )


def _draft(attention: MlaSpec, ffn: FfnSpec, norm: NormSpec, number: int, hidden: int) -> DraftSpec:
    """The draft layer, stored as one more layer of the model; it has an indexer of its own."""
    names = DraftNames("eh_proj", "enorm", "hnorm", "shared_head.norm", layer="")
    layer = LayerSpec(replace(attention, draft_width=hidden), ffn, norm)
    return DraftSpec(layer, f"model.layers.{number}.", normed=False, names=names)


def _ignored(num_layers: int, drafts: int) -> tuple[str, ...]:
    """Tensors that are not read: of draft layers, which follow the model's own, and tables."""
    numbers = "|".join(str(num_layers + i) for i in range(max(1, drafts)))
    return (rf"^model\.layers\.({numbers})\.", r"\.rotary_emb\.inv_freq$")
