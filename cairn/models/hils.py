"""HiLS-Attention models: config.json of qwen_hils and olmo_hils as a ModelSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cairn.models import fields as reading
from cairn.models import older
from cairn.models.checkpoint import StoredRows
from cairn.models.fields import ConfigFields, log, refuse
from cairn.specs.ffn import DenseFfn
from cairn.specs.gqa import GqaSpec, NormWidth
from cairn.specs.hils import HilsSpec, SummaryKind
from cairn.specs.model import BlockNames, LayerSpec, MixerSpec, ModelSpec, NormSpec
from cairn.specs.rotary import RotarySpec

WITHOUT_EFFECT = (
    "auto_insert_lmk",
    "use_olmo3_rotary_embedding",
    "max_window_layers",
    "layer_types",
    "replace_full_attention_with_hils",
)
"""Fields without effect; the last two are read for olmo_hils only."""
HILS_FIELDS = tuple(
    "hils_sliding_window hils_topk enable_softmax1 enable_prior_query shared_q_c "
    "enable_chunk_pooling enable_lmk_q_proj lmk_q_lora_dim layerwise_lmkq_norm compact_lmk_k "
    "compressed_lmk_k shared_lmk_q_norm".split()
)
"""Without effect where no layer is a landmark layer."""
HILS_NORM_EPS = 1e-6
"""Eps of the norms inside a landmark layer; rms_norm_eps does not apply to them."""
ROW_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class _Frame:
    """Fields that several parts of the mapping need."""

    family: Literal["qwen_hils", "olmo_hils"]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    theta: float
    eps: float


def spec_from_config(
    config: Mapping[str, Any], overridden: frozenset[str], stored: StoredRows
) -> ModelSpec:
    """Map a config.json of this family, released or older schema.

    Args:
        config: the parsed file, overrides merged in.
        overridden: keys that an override set.
        stored: row counts of the weight files; they win over the config's rule.

    Raises:
        BadModel: a field is of the wrong type, contradicts another, or makes a model that is not
            supported; one line with the field, its value and the remedy.
    """
    translated = older.translate(config)
    sources = {name: "override" for name in overridden} | translated.sources
    f = ConfigFields(translated.config, sources)
    reading.refuse_quantized(f.config)
    reading.activation_only(f)
    if f.flag("use_naive_bsa", False):
        raise refuse("use_naive_bsa", True, "that is another model", "Only false is supported")
    vocab = f.integer("vocab_size", 151936)
    hidden, inter = f.integer("hidden_size", 4096), f.integer("intermediate_size", 22016)
    num_layers = f.integer("num_hidden_layers", 32)
    heads, kv_heads, head_dim = _heads(f, hidden)
    frame = _Frame(
        family="olmo_hils" if f.config["model_type"] == "olmo_hils" else "qwen_hils",
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=f.integer("max_position_embeddings", 32768),
        theta=reading.rope_theta(f),
        eps=f.number("rms_norm_eps", 1e-6),
    )
    tied = f.flag("tie_word_embeddings", False)
    landmarks = _landmarks(f)
    external = f.flag("enable_external_lmk_embed", False)
    mixers = _mixers(f, frame)
    selecting = any(isinstance(mixer, HilsSpec) for mixer in mixers)
    chunk = f.integer("chunk_size", 64, low=2)
    paged = landmarks or any(mixer.mask_landmarks for mixer in mixers)
    rows = _rows(f, frame.family, vocab, external)
    spec = ModelSpec(
        architecture=frame.family,
        vocab_size=vocab,
        embedding_rows=stored.embedding or rows[0],
        head_rows=stored.head or (stored.embedding if tied else None) or rows[1],
        hidden_size=hidden,
        norm=NormSpec(frame.eps),
        tied=tied,
        chunk_size=chunk if paged else None,
        landmarks=landmarks,
        end_embedding="lmk_embed" if external else None,
        max_model_len=frame.max_positions,
        layers=tuple(_layer(mixer, inter, frame) for mixer in mixers),
        dtype=reading.stored_dtype(f.config, stored.dtype),
        eos_token_ids=reading.token_ids("eos_token_id", f.config.get("eos_token_id")),
        bos_token_id=reading.first_token_id("bos_token_id", f.config.get("bos_token_id")),
        resolved=f.resolved(),
    )
    _check_rows(spec)
    for name in translated.dropped:
        log.info("config.json: older key %s=%r has no effect here", name, config[name])
    f.warn_unknown(WITHOUT_EFFECT if selecting else WITHOUT_EFFECT + HILS_FIELDS)
    return spec


def _heads(f: ConfigFields, hidden: int) -> tuple[int, int, int]:
    """h_q, h_kv, d."""
    heads = f.integer("num_attention_heads", 32)
    kv_heads = f.optional_integer("num_key_value_heads", 32)
    if kv_heads is None:
        kv_heads = heads
        f.record("num_key_value_heads", heads, "derived: null means num_attention_heads")
    reading.grouped_heads(heads, kv_heads)
    if hidden % heads or (hidden // heads) % 2:
        raise refuse(
            "num_attention_heads",
            heads,
            f"hidden_size {hidden} does not split into {heads} heads of even width",
            "Write a num_attention_heads that divides hidden_size",
        )
    head_dim = f.optional_integer("head_dim", None)
    if head_dim not in (None, hidden // heads):
        raise refuse(
            "head_dim",
            head_dim,
            f"attention uses hidden_size / num_attention_heads = {hidden // heads}",
            f"Remove head_dim or write {hidden // heads}",
        )
    f.record("head_dim", hidden // heads, "derived: hidden_size / num_attention_heads")
    return heads, kv_heads, hidden // heads


def _landmarks(f: ConfigFields) -> bool:
    landmarks = f.flag("insert_landmarks", True)
    adjusted = f.flag("adjust_lmk_pos", landmarks)
    if landmarks and not adjusted:
        raise refuse(
            "adjust_lmk_pos",
            False,
            "insert_landmarks is true, and landmarks without adjusted positions are trained one "
            "way and inferred another",
            "Remove adjust_lmk_pos, or write insert_landmarks: false",
        )
    return landmarks


def _layer(mixer: MixerSpec, intermediate: int, frame: _Frame) -> LayerSpec:
    """A layer around its mixer."""
    ffn, norm = DenseFfn(intermediate), NormSpec(frame.eps)
    if frame.family != "olmo_hils":
        return LayerSpec(mixer, ffn, norm)
    names = BlockNames(
        mixer_norm=None,
        ffn_norm=None,
        mixer_out_norm="post_attention_layernorm",
        ffn_out_norm="post_feedforward_layernorm",
    )
    return LayerSpec(mixer, ffn, norm, names=names)


def _mixers(f: ConfigFields, frame: _Frame) -> tuple[GqaSpec, ...]:
    """The attention of each layer (1.2), with windows and rotary variants."""
    olmo = frame.family == "olmo_hils"
    interleave = f.integer("full_attn_interleave", 4, low=0)
    first = f.integer("num_swa_layers", 0, low=0)
    global_layers = {
        i
        for i in range(first, frame.num_layers)
        if interleave and (i - first) % interleave == interleave - 1
    }
    replaced = f.flag("replace_full_attention_with_hils", True) if olmo else True
    hils_layers = global_layers if replaced else set()
    plain_window, hils_window = _windows(f, bool(hils_layers))
    types = f.layer_types(frame.num_layers) if olmo else None
    if types is None:
        types = [
            "full_attention" if i in global_layers else "sliding_attention"
            for i in range(frame.num_layers)
        ]
    elif plain_window is None and "sliding_attention" in types:
        log.warning("config.json: layer_types has sliding_attention, but no sliding_window is on")
    mask = f.flag("mask_lmk_token", False)
    bias = f.flag("attention_bias", False)
    layerwise = f.flag("layerwise_qk_norm", False)
    plain_rotary, hils_rotary = _rotaries(f, frame)
    heads = (frame.num_heads, frame.num_kv_heads, frame.head_dim)
    norm: NormWidth = "full" if layerwise else "head"
    selecting = None
    if hils_window is not None:
        selecting = _hils(f, _gqa(heads, hils_rotary, norm, HILS_NORM_EPS, window=hils_window))
    norm = "full" if olmo else "head"
    mixers: list[GqaSpec] = []
    for i in range(frame.num_layers):
        if i in hils_layers and selecting is not None:
            mixers.append(selecting)
            continue
        window = plain_window if not olmo or types[i] == "sliding_attention" else None
        plain = _gqa(heads, plain_rotary, norm, frame.eps, window=window)
        mixers.append(GqaSpec(**plain, mask_landmarks=mask, bias=bias, out_bias=bias))
    return tuple(mixers)


def _gqa(
    heads: tuple[int, int, int],
    rotary: RotarySpec | None,
    norm: NormWidth,
    eps: float,
    *,
    window: int | None,
) -> dict[str, Any]:
    """Fields shared by plain and landmark attention."""
    return {
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": heads[2],
        "rotary": rotary,
        "qk_norm": norm,
        "qk_eps": eps,
        "window": window,
    }


def _windows(f: ConfigFields, has_hils: bool) -> tuple[int | None, int | None]:
    """Ws of the plain layers and W of the landmark layers."""
    switch = f.flag("use_sliding_window", False)
    plain = f.optional_integer("sliding_window", 4096) if switch else None
    if not switch:
        f.record("sliding_window", None, "derived: use_sliding_window is false")
    if not has_hils:
        return plain, None
    window = f.optional_integer("hils_sliding_window", None)
    if window is None:
        if plain is None:
            raise refuse(
                "hils_sliding_window",
                None,
                "it is absent and no sliding_window is on (use_sliding_window)",
                "Write hils_sliding_window, at least 1",
            )
        window = plain
        f.record("hils_sliding_window", window, "default: the effective sliding_window")
    return plain, window


def _rotaries(f: ConfigFields, frame: _Frame) -> tuple[RotarySpec, RotarySpec | None]:
    """Rotary of the plain layers and of the landmark layers (the table of 2.4)."""
    olmo = frame.family == "olmo_hils"
    apply = f.flag("apply_hils_rope", False)
    hope = f.flag("use_hope", False)
    in_range = f.flag("enable_inrange_rope", False)
    context = f.integer("rope_context_length", frame.max_positions)
    multiplier = f.number("rope_period_multiplier", 1.0)
    closed_form = _closed_form(f, frame)
    if olmo and in_range and not hope:
        f.record("enable_inrange_rope", False, "derived: olmo_hils reads it only with use_hope")
        in_range = False
    # Every olmo path and the HoPE module round cos and sin to the model's dtype.
    rounded = olmo or hope
    standard = RotarySpec("standard", frame.head_dim, frame.theta, rounded=rounded)
    special = standard
    if in_range:
        special = RotarySpec(
            "in_range", frame.head_dim, frame.theta, context, multiplier, rounded=rounded
        )
    elif hope:
        special = closed_form
    return (standard if olmo else special), (special if apply else None)


def _closed_form(f: ConfigFields, frame: _Frame) -> RotarySpec:
    """HoPE's closed form: the first n pairs, from 1 down to one turn per context."""
    half = frame.head_dim // 2
    ratio = f.number("hope_partial_ratio", 0.5)
    context = f.integer("hope_context_length", frame.max_positions)
    pairs = min(max(round(ratio * half), 1), half)
    theta = f.config.get("hope_theta")
    if theta is not None:
        theta = f.number("hope_theta", 1.0)
    else:
        theta = (context / (2 * math.pi)) ** (pairs / (pairs - 1)) if pairs > 1 else 1.0
        f.record("hope_theta", theta, "derived: (hope_context_length / 2 pi) ^ (n / (n - 1))")
    return RotarySpec("hope", frame.head_dim, theta, pairs=pairs, rounded=True)


def _hils(f: ConfigFields, attention: dict[str, Any]) -> HilsSpec:
    """A landmark layer's attention, the same for all layers of a model."""
    prior = f.flag("enable_prior_query", True)
    shared = f.flag("shared_q_c", False)
    mean = f.flag("enable_chunk_pooling", False)
    compact, compressed = f.flag("compact_lmk_k", False), f.flag("compressed_lmk_k", False)
    for name, on in (("shared_q_c", shared), ("compressed_lmk_k", compressed)):
        if on and not prior:
            raise refuse(
                name,
                True,
                "it needs the prior query, and enable_prior_query is false",
                f"Remove {name} or write enable_prior_query: true",
            )
    if mean + compact + compressed > 1:
        names = [
            n
            for n in ("enable_chunk_pooling", "compact_lmk_k", "compressed_lmk_k")
            if f.flag(n, False)
        ]
        raise refuse(
            names[1],
            True,
            f"{names[0]} is true as well, and a page has one key",
            f"Remove {names[0]} or {names[1]}",
        )
    summary: SummaryKind = "prior"
    if mean:
        summary = "mean"
    elif compact or not prior:
        summary = "landmark"
    project = f.flag("enable_lmk_q_proj", False)
    rank = f.integer("lmk_q_lora_dim", -1, low=-(2**63))
    lmk_q: Literal["full", "lora"] | None = None
    if project:
        lmk_q = "lora" if rank > 0 else "full"
    full_width = f.flag("layerwise_lmkq_norm", False)
    shared_norm = f.flag("shared_lmk_q_norm", False) and project
    if shared_norm and full_width != f.flag("layerwise_qk_norm", False):
        raise refuse(
            "shared_lmk_q_norm",
            True,
            "layerwise_lmkq_norm and layerwise_qk_norm differ, so q_norm does not fit",
            "Write the same value for both",
        )
    return HilsSpec(
        **attention,
        mask_landmarks=True,
        topk=f.integer("hils_topk", 16),
        softmax1=f.flag("enable_softmax1", True),
        summary=summary,
        bias_by_entropy=prior,
        shared_query=shared,
        group_query=compressed,
        lmk_q=lmk_q,
        lora_rank=rank if lmk_q == "lora" else 0,
        lmk_q_norm="full" if full_width else "head",
        shared_lmk_q_norm=shared_norm,
    )


def _rows(f: ConfigFields, family: str, vocab: int, external: bool) -> tuple[int, int]:
    """Rows of embedding and head by the config's rule."""
    rows = math.ceil((vocab + 1) / ROW_MULTIPLE) * ROW_MULTIPLE
    if family == "olmo_hils":
        named = f.config.get("insert_landmarks") is True or f.config.get("adjust_lmk_pos") is True
        if external or not named:
            rows = vocab
    return rows, vocab if external else rows


def _check_rows(spec: ModelSpec) -> None:
    need = spec.vocab_size if spec.end_embedding else spec.table_rows
    if spec.embedding_rows < need:
        raise refuse(
            "vocab_size",
            spec.vocab_size,
            f"the embedding has {spec.embedding_rows} rows, {need} are needed"
            + (f" (the landmark is id {spec.landmark_id})" if spec.landmarks else ""),
            "Write insert_landmarks: false if the model has no landmarks, or "
            "enable_external_lmk_embed: true if its landmark embedding is a tensor of its own",
        )
    if not spec.tied and spec.head_rows < spec.vocab_size:
        raise refuse(
            "vocab_size",
            spec.vocab_size,
            f"lm_head.weight has {spec.head_rows} rows",
            "Write the vocabulary size the weights were trained with",
        )
