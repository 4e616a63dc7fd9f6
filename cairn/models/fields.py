"""Reading config.json field by field: types, defaults, refusals, and where values came from."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cairn.errors import BadModel
from cairn.models.checkpoint import StoredRows
from cairn.names import nearest
from cairn.specs.model import ELEMENT_SIZE, ResolvedField

log = logging.getLogger(__name__)

V = TypeVar("V")

BOOKKEEPING = frozenset(
    "architectures model_type auto_map torch_dtype dtype transformers_version _name_or_path "
    "name_or_path bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id "
    "tokenizer_class initializer_range attention_dropout use_cache _attn_implementation "
    "_attn_implementation_autoset attn_implementation return_dict output_attentions "
    "output_hidden_states torchscript use_bfloat16 is_decoder is_encoder_decoder "
    "add_cross_attention cross_attention_hidden_size tie_encoder_decoder pruned_heads "
    "chunk_size_feed_forward id2label label2id problem_type finetuning_task prefix "
    "task_specific_params decoder_start_token_id pretraining_tp".split()
)
"""Keys of config.json without effect on inference."""


def refuse(name: str, value: object, why: str, remedy: str) -> BadModel:
    """The error for one impossible field, in one line: field, value, reason, remedy."""
    return BadModel(f"config.json: {name} is {value!r}: {why}", remedy)


class ConfigFields:
    """Reader of a config.json that records which fields were read and where values came from.

    Every getter records the resulting value and whether it was written or a default. A value of the
    wrong type, or null where null has no meaning, raises BadModel.

    Args:
        config: the parsed file, overrides merged in, older names already translated.
        sources: source of fields that did not come from the file under their own name.
    """

    def __init__(self, config: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> None:
        self.config = config
        self._sources = dict(sources or {})
        self._resolved: dict[str, ResolvedField] = {}

    def written(self, name: str) -> bool:
        """Whether the config holds the field (null counts as written)."""
        return name in self.config

    def flag(self, name: str, default: bool) -> bool:
        """A true or false field."""
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise refuse(name, value, "not true or false", f"Write true or false for {name}")
        return self._settle(name, value)

    def integer(self, name: str, default: int, low: int = 1) -> int:
        """An integer field >= `low`."""
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise refuse(
                name, value, f"not an integer >= {low}", f"Write an integer >= {low} for {name}"
            )
        return self._settle(name, value)

    def optional_integer(self, name: str, default: int | None, low: int = 1) -> int | None:
        """An integer field >= `low` that may be null or have no default."""
        if self.config.get(name, default) is None:
            return self._settle(name, None)
        return self.integer(name, default if default is not None else low, low)

    def number(self, name: str, default: float, above: float = 0.0) -> float:
        """A finite number > `above`."""
        value = self.config.get(name, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or value <= above:
            raise refuse(
                name, value, f"not a number > {above:g}", f"Write a number > {above:g} for {name}"
            )
        return self._settle(name, float(value))

    def layer_types(
        self, count: int, known: Sequence[str] = ("full_attention", "sliding_attention")
    ) -> list[str] | None:
        """`layer_types`, one of the `known` kinds per layer; None where absent."""
        value = self.config.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise refuse(
                "layer_types", value, f"not a list of {count} entries", "Write one entry per layer"
            )
        for entry in value:
            if entry not in known:
                raise refuse(
                    "layer_types", entry, "an unknown kind of layer", f"Known: {', '.join(known)}"
                )
        return self._settle("layer_types", value)

    def record(self, name: str, value: object, source: str) -> None:
        """Record a field that follows from others, or whose written value is overruled."""
        self._resolved[name] = ResolvedField(name, value, source)

    def source(self, name: str) -> str:
        """Where the field's value comes from."""
        return self._sources.get(name, "config" if name in self.config else "default")

    def resolved(self) -> tuple[ResolvedField, ...]:
        """Every field read so far, in the order of first reading."""
        return tuple(self._resolved.values())

    def warn_unknown(self, without_effect: Iterable[str] = ()) -> list[str]:
        """Log every key that nothing read and that may have an effect; returns them."""
        known = BOOKKEEPING | set(without_effect) | set(self._resolved)
        unknown = [name for name in self.config if name not in known]
        for name in unknown:
            close = nearest(name, set(self._resolved))
            hint = f" (did you mean {close!r}?)" if close else ""
            log.warning("config.json: unknown key %s=%r ignored%s", name, self.config[name], hint)
        return unknown

    def _settle(self, name: str, value: V) -> V:
        self._resolved[name] = ResolvedField(name, value, self.source(name))
        return value


def rope_theta(fields: ConfigFields, default: float = 10000.0) -> float:
    """Base of the rotary frequencies; a scaled rotary is refused by the name of its type.

    Reads `rope_theta` and `rope_scaling`, or `rope_parameters`, which newer files have instead.
    """
    nested = fields.config.get("rope_parameters")
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.config.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise refuse(name, value, "not an object", f"Write null for {name}")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default" or any(isinstance(entry, dict) for entry in value.values()):
            raise refuse(
                name, value, f"rotary of type {kind!r} is not supported", "Only unscaled rotary is"
            )
    fields.record("rope_scaling", None, fields.source("rope_scaling"))
    if isinstance(nested, dict):
        fields.record("rope_parameters", nested, "config")
    return _rope_number(fields, "rope_theta", default)


def rotated_dims(fields: ConfigFields, head_dim: int, default: float) -> int:
    """Leading dimensions of a head that rotate: `partial_rotary_factor` of them, read from the same
    place as `rope_theta`."""
    factor = _rope_number(fields, "partial_rotary_factor", default)
    count = int(head_dim * factor)
    if factor > 1 or count < 2 or count % 2:
        raise refuse(
            "partial_rotary_factor",
            factor,
            f"{count} of {head_dim} dimensions (head_dim) cannot rotate in pairs",
            "Write a factor that gives an even number of them",
        )
    return count


def _rope_number(fields: ConfigFields, name: str, default: float) -> float:
    """A number of the rotary embedding, at the top level or in `rope_parameters`."""
    value, nested = fields.number(name, default), fields.config.get("rope_parameters")
    inner = nested.get(name) if isinstance(nested, dict) else None
    if inner is None:
        return value
    if fields.written(name) and value != inner:
        raise refuse(name, value, f"rope_parameters says {inner}", "Write one of them")
    value = ConfigFields({name: inner}).number(name, default)
    fields.record(name, value, "config (rope_parameters)")
    return value


def stored_dtype(config: Mapping[str, Any], fallback: str | None) -> str:
    """The dtype that `torch_dtype` (newer: `dtype`) names, else `fallback`, else float32."""
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None:
        return fallback or "float32"
    name = str(value).removeprefix("torch.")
    if name not in ELEMENT_SIZE:
        raise refuse("torch_dtype", value, "unsupported", f"Use one of {', '.join(ELEMENT_SIZE)}")
    return name


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """A token id field (null, one id or a list of ids) as a tuple without repeats."""
    if value is None:
        return ()
    ids: Sequence[Any] = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise refuse(name, value, "not a token id", "Write a token id, a list of them or null")
    return tuple(dict.fromkeys(ids))


def first_token_id(name: str, value: object) -> int | None:
    """The first id of a token id field, None where it is null."""
    return next(iter(token_ids(name, value)), None)


def vocabulary_rows(vocab: int, tied: bool, stored: StoredRows) -> tuple[int, int]:
    """Rows of embedding and head as they are stored: at least those of the vocabulary."""
    rows, head_rows = stored.embedding or vocab, stored.head or stored.embedding or vocab
    if min(rows, rows if tied else head_rows) < vocab:
        raise refuse(
            "vocab_size",
            vocab,
            f"the weights have {min(rows, head_rows)} rows",
            "Write the vocabulary size the weights were trained with",
        )
    return rows, head_rows


def vocabulary_fields(
    config: Mapping[str, Any], vocab: int, tied: bool, stored: StoredRows
) -> dict[str, Any]:
    """Fields of ModelSpec that a family does not define: stored rows, dtype, special tokens."""
    embedding_rows, head_rows = vocabulary_rows(vocab, tied, stored)
    return {
        "vocab_size": vocab,
        "embedding_rows": embedding_rows,
        "head_rows": head_rows,
        "tied": tied,
        "dtype": stored_dtype(config, stored.dtype),
        "eos_token_ids": token_ids("eos_token_id", config.get("eos_token_id")),
        "bos_token_id": first_token_id("bos_token_id", config.get("bos_token_id")),
    }


def activation_only(fields: ConfigFields, name: str = "hidden_act", known: str = "silu") -> None:
    """Refuse every activation of feed-forward layers but the supported one."""
    value = fields.config.get(name, known)
    if value != known:
        raise refuse(name, value, "unsupported activation", f"Only {known} is supported")
    fields.record(name, value, fields.source(name))


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights are quantized."""
    value = config.get("quantization_config")
    if value is not None:
        method = value.get("quant_method", value) if isinstance(value, dict) else value
        raise refuse(
            "quantization_config",
            method,
            "quantized weights are not supported",
            "Use the float32, bfloat16 or float16 checkpoint",
        )


def key_value_heads(fields: ConfigFields, num_heads: int, default: int | None) -> int:
    """`num_key_value_heads`; null: as many as query heads."""
    kv_heads = fields.optional_integer("num_key_value_heads", default) or num_heads
    fields.record("num_key_value_heads", kv_heads, fields.source("num_key_value_heads"))
    grouped_heads(num_heads, kv_heads)
    return kv_heads


def grouped_heads(num_heads: int, num_kv_heads: int) -> None:
    """Refuse head counts that cannot be grouped."""
    if num_heads % num_kv_heads:
        raise refuse(
            "num_key_value_heads",
            num_kv_heads,
            f"{num_heads} query heads (num_attention_heads) cannot share {num_kv_heads} KV heads",
            "Write a divisor of num_attention_heads",
        )
