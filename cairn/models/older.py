"""The older schema of landmark models (FlashHSAConfig, HSAForCausalLM) in released names.

Keys are renamed, keys without effect are dropped, and keys of unsupported variants are refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cairn.models.fields import refuse

MODEL_TYPES = {"qwen_lhsa": "qwen_hils", "olmo_lhsa": "olmo_hils"}
ARCHITECTURE = "HSAForCausalLM"

RENAMED = {
    "hsa_topk": "hils_topk",
    "hsa_sliding_window": "hils_sliding_window",
    "apply_hsa_rope": "apply_hils_rope",
    "replace_full_attention_with_lhsa": "replace_full_attention_with_hils",
}
WITHOUT_EFFECT = frozenset(
    "headwise_topk_softmax decoder_variant base_model hsa_dropout_prob hsa_disturb_prob "
    "retrieval_head_num use_gumbel gumbel".split()
)
OTHER_MODELS = ("unified_retrieval", "enable_gate", "nope_retrieval", "intra_chunk_rope")
CHECKED = frozenset(
    "hsa_heads hsa_qk_ratio groupwise_topk hsa_mode retrieval_dim hsa_visible_window "
    "enable_hsa_swa flash_hsa_innerx".split()
)


@dataclass(slots=True)
class Translated:
    """A config in released names.

    Attributes:
        config: without any older key.
        sources: released name -> "config (older name)".
        dropped: older keys that were accepted without effect.
    """

    config: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def translate(config: Mapping[str, Any]) -> Translated:
    """Rewrite `config` in released names; a config that has no older key comes back unchanged.

    Raises:
        BadModel: a key makes another model, or an older and a released key contradict each other.
    """
    out = Translated(dict(config))
    model_type = config.get("model_type")
    if model_type in MODEL_TYPES:
        out.config["model_type"] = MODEL_TYPES[model_type]
    _refuse_other_models(config)
    _check_full_heads(config, _is_older(config))
    for old, new in RENAMED.items():
        if old in out.config:
            _rename(out, old, new)
    _merge_windows(out)
    for name in list(out.config):
        if name in WITHOUT_EFFECT or name in CHECKED or name in OTHER_MODELS or "gumbel" in name:
            del out.config[name]
            out.dropped.append(name)
    return out


def _is_older(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in MODEL_TYPES or ARCHITECTURE in (
        config.get("architectures") or []
    )


def _rename(out: Translated, old: str, new: str) -> None:
    value = out.config.pop(old)
    if new in out.config and out.config[new] != value:
        raise refuse(old, value, f"{new} is {out.config[new]!r}", f"Remove {old} or {new}")
    if new not in out.config:
        out.config[new] = value
        out.sources[new] = f"config ({old})"


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    another = "that is another model, which this engine does not implement"
    for name in OTHER_MODELS:
        if config.get(name):
            raise refuse(name, config[name], another, f"Only {name}: false is supported")
    checks: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("groupwise_topk", (False, None)),
        ("hsa_mode", ("sparse", None)),
        ("retrieval_dim", (None, -1, 0)),
        ("hsa_visible_window", (-1, None)),
        ("enable_hsa_swa", (True, None)),
    )
    for name, accepted in checks:
        value = config.get(name, accepted[0])
        # 0 == False and 1 == True in Python; in config.json they differ.
        if not any(value == good and type(value) is type(good) for good in accepted):
            raise refuse(name, value, another, f"Only {name}: {accepted[0]!r} is supported")


def _check_full_heads(config: Mapping[str, Any], older: bool) -> None:
    """Refuse a model in which only some heads select pages.

    In the older generation absent keys meant a quarter of the heads and a ratio of 4.
    """
    heads = config.get("num_attention_heads", 32)
    kv_heads = config.get("num_key_value_heads", 32)
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        return  # num_attention_heads is refused where it is read
    kv_heads = heads if kv_heads is None else kv_heads
    given = config.get("hsa_heads", heads // 4 if older else heads)
    if given != heads:
        what = "absent, which means a quarter of the heads," if "hsa_heads" not in config else given
        raise refuse(
            "hsa_heads",
            given,
            f"it is {what} but only models whose {heads} heads all retrieve are supported",
            f"Serve a full-head model (hsa_heads: {heads})",
        )
    if not isinstance(kv_heads, int) or isinstance(kv_heads, bool) or kv_heads < 1:
        return
    ratio = config.get("hsa_qk_ratio", 4 if older else heads / kv_heads)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio * kv_heads != heads:
        raise refuse(
            "hsa_qk_ratio",
            ratio,
            f"num_attention_heads / num_key_value_heads is {heads / kv_heads:g}",
            "Serve a full-head model (hsa_qk_ratio equal to that quotient)",
        )


def _merge_windows(out: Translated) -> None:
    """Turn both older pairs of switch and size into the released fields."""
    config = out.config
    if config.pop("use_sliding_window_merging", False):
        size = config.pop("sliding_window_merging_size", None)
        if config.get("hils_sliding_window") is None and size is not None:
            config["hils_sliding_window"] = size
            out.sources["hils_sliding_window"] = "config (sliding_window_merging_size)"
    else:
        config.pop("sliding_window_merging_size", None)
    names = ("use_sliding_window_attention", "sliding_window_attention_size")
    if not any(name in config for name in names):
        return
    # Both keys are read together: the unprefixed ones are defaults of a base class, unless they
    # switch on a different window; then it is unknown which one was trained.
    switch, size = config.pop(names[0], False), config.pop(names[1], None)
    if switch is True and size is None:
        raise refuse(names[0], switch, f"{names[1]} is absent", f"Write {names[1]}")
    plain_on = config.get("use_sliding_window") is True
    if plain_on and (switch is not True or config.get("sliding_window", 4096) != size):
        raise refuse(
            names[1],
            size if switch else switch,
            f"sliding_window says {config.get('sliding_window', 4096)!r}",
            "Remove one of the two pairs of keys",
        )
    config["use_sliding_window"], config["sliding_window"] = switch, size
    out.sources["use_sliding_window"] = f"config ({names[0]})"
    out.sources["sliding_window"] = f"config ({names[1]})"
