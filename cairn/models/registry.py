"""Models by name: config.json -> ModelSpec -> loaded module."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.errors import BadModel
from cairn.models import deepseek, deepseek_v4, dense, gemma3, hils, older, qwen3_moe, qwen_hybrid
from cairn.models.checkpoint import (
    StoredRows,
    TensorEntry,
    has_weights,
    is_gguf,
    read_headers,
    same_numbers,
    stored_rows,
)
from cairn.models.fields import BOOKKEEPING, refuse, token_ids
from cairn.models.folders import refuse_other_paths, refuse_other_weights, refuse_quantized
from cairn.models.gguf_file import GgufFile
from cairn.models.vision.config import with_preprocessing
from cairn.names import suggestion
from cairn.specs.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from cairn.distributed.groups import Group
    from cairn.distributed.rounds import Rounds
    from cairn.models.decoder import Decoder

log = logging.getLogger(__name__)

ConfigMapping = Callable[[Mapping[str, Any], frozenset[str], StoredRows], ModelSpec]

MODELS: dict[str, ConfigMapping] = {
    "qwen_hils": hils.spec_from_config,
    "olmo_hils": hils.spec_from_config,
    **dict.fromkeys(dense.FAMILIES, dense.spec_from_config),
    "qwen3_moe": qwen3_moe.spec_from_config,
    **dict.fromkeys(qwen_hybrid.FAMILIES, qwen_hybrid.spec_from_config),
    **dict.fromkeys(gemma3.FAMILIES, gemma3.spec_from_config),
    "deepseek_v32": deepseek.spec_from_config,
    "glm_moe_dsa": deepseek.spec_from_config,
    "deepseek_v4": deepseek_v4.spec_from_config,
}
"""model_type -> mapping of its config.json. A new model is one file and one line here."""

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "DeepseekV4ForCausalLM": "deepseek_v4",
}
"""Architectures that name their model_type alone; the others need model_type written."""

UNSUPPORTED = {
    "glm5_next": "its linear-attention layers and pooled indexer are not, although its fields "
    "have the names of glm_moe_dsa",
    "deepseek_v41": "its shared key sources and n-gram tables are not, although its fields have "
    "the names of deepseek_v4",
}
"""Model types that look like known ones, and why they are not supported."""


def load_spec(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Read a model's spec. Needs no torch and executes no code of the folder.

    Args:
        source: the model's folder, its GGUF file, or the content of a config.json.
        overrides: fields of config.json to replace.

    Raises:
        BadModel: no such folder, an unreadable config.json, an unknown model_type, a field that is
            impossible, contradictory or not supported; a truncated weight file.
    """
    config: dict[str, Any]
    headers: dict[str, TensorEntry] = {}
    stored = StoredRows()
    more_eos: tuple[int, ...] = ()
    if isinstance(source, Mapping):
        config = dict(source)
    elif is_gguf(Path(source)):
        config = dict(GgufFile(Path(source)).config)
        headers = read_headers(Path(source))
        stored = stored_rows(headers)
    else:
        folder = Path(source)
        refuse_other_paths(folder)
        config = _read_json(folder / "config.json")
        refuse_other_weights(folder)
        if has_weights(folder):
            headers = read_headers(folder)
        refuse_quantized(config, folder, headers)
        stored = stored_rows(headers)
        if (folder / "generation_config.json").is_file():
            generation = _read_json(folder / "generation_config.json")
            try:
                more_eos = token_ids("eos_token_id", generation.get("eos_token_id"))
            except BadModel as error:
                raise BadModel(f"generation_{error.message}", error.hint) from None
    config |= overrides or {}
    if config.get("auto_map"):
        log.info("config.json: auto_map ignored; Python files of a model folder are never run")
    model_type = _model_type(config)
    spec = MODELS[model_type](config, frozenset(overrides or ()), stored)
    _check_overrides(overrides or {}, spec)
    spec = _with_its_own_head(spec, headers)
    if spec.vision is not None and headers and not _stored(spec.vision.prefix, headers):
        log.warning("the weights hold no vision encoder: text alone is served")
        spec = spec.without_vision()
    if spec.vision is not None and not isinstance(source, Mapping):
        spec = replace(spec, vision=with_preprocessing(spec.vision, Path(source)))
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more_eos)))


def load_model(
    path: str | Path,
    spec: ModelSpec,
    dtype: torch.dtype | str,
    device: torch.device | str,
    random_seed: int | None = None,
    group: Group | None = None,
    rounds: Rounds | None = None,
) -> Decoder:
    """Build the model on `device` and fill it.

    Args:
        path: the model's folder; not read when `random_seed` is given.
        spec: from `load_spec`.
        dtype: of the parameters, independent of the files' dtype.
        device: device of the parameters.
        random_seed: draw the weights from this seed instead of reading files.
        group: ranks of which this one loads its share; None: the model is not divided.
        rounds: of engines of which this one has a share of the experts; None: it has all.

    Raises:
        BadConfig: the model cannot be divided between this many ranks.
        BadModel: the weights are absent, pickled, corrupt, or do not fit the config.
    """
    import torch

    from cairn.distributed.groups import ALONE
    from cairn.models.decoder import Decoder
    from cairn.models.sharding import Division, divide, local
    from cairn.models.weights import draw_weights, load_weights

    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    group = group or ALONE
    with torch.device("meta"):
        model = whole = Decoder(local(spec, group.size), kind, group, rounds)
        if not (group.alone and rounds is None):
            whole = Decoder(spec, kind)
            divide(model, whole)
    # Module.to_empty does the same by empty_like, which imports sympy for tensors without memory.
    model._apply(  # type: ignore[no-untyped-call]
        lambda like: torch.empty(like.shape, dtype=like.dtype, device=device)
    )
    division = Division(whole, group if rounds is None else rounds.group)
    if random_seed is None:
        load_weights(model, Path(path), spec.ignored, division)
    else:
        draw_weights(model, random_seed, division)
    return model.eval()


def measure_weights(
    spec: ModelSpec, dtype: torch.dtype | str, group: Group | None = None
) -> tuple[int, int]:
    """Parameters of a model and the bytes that they take in this dtype; nothing is read.

    Args:
        spec: of the model, or of the share of a rank of `group`.
    """
    import torch

    from cairn.distributed.groups import ALONE
    from cairn.models.decoder import Decoder
    from cairn.models.weights import parameter_bytes

    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        model = Decoder(spec, kind, group or ALONE)
    return parameter_bytes(model)


def _stored(prefix: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether the files have a tensor whose name begins with the prefix."""
    return any(name.startswith(prefix) for name in entries)


def _with_its_own_head(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> ModelSpec:
    """The spec, untied if the files have a head that differs from the embedding: some fine-tunes
    train a head but keep the config of their base model.

    Raises:
        BadModel: the head has another shape than the embedding.
    """
    head = entries.get(f"{spec.head}.weight")
    table = entries.get(f"{spec.prefix}{spec.table}.weight")
    if not spec.tied or head is None or table is None:
        return spec
    if head.shape != table.shape:
        raise BadModel(
            f"config.json: tie_word_embeddings is true, but {spec.head}.weight is "
            f"{list(head.shape)} and the embedding {list(table.shape)}",
            "Write tie_word_embeddings: false if the head is trained apart",
        )
    if same_numbers(head, table):
        return spec
    log.warning(
        "config.json: tie_word_embeddings is true, but %s.weight differs from the embedding: "
        "it is used",
        spec.head,
    )
    return replace(spec, tied=False, head_rows=head.shape[0])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadModel(f"{path.parent} has no {path.name}", "Give the folder of a model")
    try:
        # Some editors begin a file with a byte order mark.
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise BadModel(f"{path} is not JSON: {error}", "Copy the file again") from None
    if not isinstance(content, dict):
        raise BadModel(f"{path} is not a JSON object", "Copy the file again")
    return content


def _model_type(config: dict[str, Any]) -> str:
    """The model_type in the released schema; fills it in where only an architecture is written."""
    written = config.get("model_type")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise refuse("architectures", architectures, "not a list", "Write a list of names")
    if written is None:
        written = next((ARCHITECTURES[a] for a in architectures if a in ARCHITECTURES), None)
        config["model_type"] = written
    resolved = older.MODEL_TYPES.get(str(written), str(written))
    if resolved in UNSUPPORTED:
        raise refuse("model_type", written, UNSUPPORTED[resolved], "Use another model")
    if written is None or resolved not in MODELS:
        known = ", ".join(sorted({*MODELS, *older.MODEL_TYPES}))
        raise BadModel(
            f"config.json: model_type is {written!r} (architectures: {architectures}): unknown",
            f"Known: {known}",
        )
    return resolved


def _check_overrides(overrides: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raise BadModel for an override of a field that the model does not have."""
    names = {entry.name for entry in spec.resolved}
    for name, value in overrides.items():
        if name in names or name in BOOKKEEPING or name in older.RENAMED:
            continue
        raise refuse(
            name,
            value,
            "this model has no such field",
            suggestion(name, names),
        )
