"""`quantization_config` of a config.json: which quantised checkpoints can be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cairn.errors import BadModel
from cairn.models.fields import ConfigFields, refuse
from cairn.specs.quantization import QuantizationSpec, StoredFormat

FIELD = "quantization_config"
SUPPORTED = (
    "Supported: fp8 (e4m3, of a matrix or in blocks), gptq, awq, compressed-tensors, and fp8 and "
    "NVFP4 of modelopt"
)
REFUSED = {
    "bitsandbytes": "weights of bitsandbytes are quantised on load by its own library",
    "gguf": "GGUF's blocks in safetensors are not",
    "mlx": "weights of MLX are in Apple's layout",
    "exl2": "weights of ExLlamaV2 have bits of their own for each group of rows",
    "exl3": "weights of ExLlamaV3 are trellis codes",
    "aqlm": "weights of AQLM are codes of several books",
    "quip": "weights of QuIP# are codes of a lattice",
    "hqq": "weights of HQQ are in its own layout",
    "eetq": "weights of EETQ are in its own layout",
    "torchao": "weights of torchao are pickled tensor subclasses",
    "mxfp4": "weights of GPT-OSS are in blocks of all experts",
    "bitnet": "weights of BitNet have three values",
    "vptq": "weights of VPTQ are codes of books of vectors",
    "quark": "weights of Quark are in its own layout",
}
"""Method -> its description in the error message."""


def quantization_of(f: ConfigFields) -> QuantizationSpec | None:
    """How the matrices of a checkpoint are quantised: not at all, or as `quantization_config` says.

    Raises:
        BadModel: another method, or a parameter of it that is not supported.
    """
    value = f.config.get(FIELD)
    if value is None:
        f.record(FIELD, None, f.source(FIELD))
        return None
    if not isinstance(value, dict):
        raise refuse(FIELD, value, "not an object", "Write null for it")
    method = value.get("quant_method")
    if method not in METHODS:
        why = REFUSED.get(str(method), "quantised weights of this method")
        raise refuse(FIELD, method, f"{why}, which are not supported", SUPPORTED)
    told, spec = METHODS[method](value)
    f.record(FIELD, told, f.source(FIELD))
    return spec


def _fp8(value: Mapping[str, Any]) -> tuple[str, QuantizationSpec]:
    """e4m3 with a scale for each block, or one for a matrix. Scales tell their own format, so
    `scale_fmt` has no effect."""
    block = value.get("weight_block_size")
    _known(value, "fmt", ("e4m3", None))
    _known(value, "activation_scheme", ("dynamic", None, *(("static",) if block is None else ())))
    _known(value, "scale_fmt", ("ue8m0", "float", None))
    plain = _names(value, "modules_to_not_convert", "ignored_layers")
    if block is None:
        return "fp8", QuantizationSpec("stored", plain=plain, stored=StoredFormat("fp8", group=0))
    rows, columns = _pair("weight_block_size", block)
    told = f"fp8, blocks of {rows} x {columns}"
    return told, QuantizationSpec("fp8_block", (rows, columns), plain)


def _gptq(value: Mapping[str, Any]) -> tuple[str, QuantizationSpec]:
    """Words of GPTQ. `dynamic` may take modules out: regular expressions that begin with "-:"."""
    bits = _one_of(value, "bits", (2, 3, 4, 8))
    group = _group(value, "group_size")
    ordered = bool(value.get("desc_act", False))
    form = _one_of(value, "checkpoint_format", ("gptq", "gptq_v2", None))
    patterns = []
    for rule in value.get("dynamic") or {}:
        if not str(rule).startswith("-:"):
            raise _part("dynamic", rule, "bits of single modules are not supported")
        patterns.append(_pattern("dynamic", str(rule)[2:]))
    stored = StoredFormat("gptq", bits, group, True, ordered, form != "gptq_v2")
    told = f"gptq, {bits} bits, groups of {group or 'a row'}{', act order' if ordered else ''}"
    plain = _names(value, "modules_to_not_convert")
    return told, QuantizationSpec("stored", plain=plain, stored=stored, patterns=tuple(patterns))


def _awq(value: Mapping[str, Any]) -> tuple[str, QuantizationSpec]:
    """Words of AWQ. Modules whose names hold one of `modules_to_not_convert` are not quantised."""
    bits = _one_of(value, "bits", (4,))
    _known(value, "version", ("gemm", "GEMM", None))
    if value.get("zero_point") is False:
        raise _part("zero_point", False, "not supported: AWQ's words have zero points")
    group = _group(value, "group_size")
    parts = _names(value, "modules_to_not_convert")
    stored = StoredFormat("awq", bits, group, True)
    patterns = tuple(re.escape(part) for part in parts)
    told = f"awq, {bits} bits, groups of {group or 'a row'}"
    return told, QuantizationSpec("stored", stored=stored, patterns=patterns)


def _compressed(value: Mapping[str, Any]) -> tuple[str, QuantizationSpec]:
    """compressed-tensors: one group of settings for all linear maps but those ignored."""
    groups = value.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _part("config_groups", groups, "not one group of settings for all linear maps")
    [group] = groups.values()
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise _part("config_groups", group, "not for targets ['Linear']")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _part("config_groups.weights", weights, "not an object")
    form = group.get("format") or value.get("format")
    if value.get("kv_cache_scheme"):
        raise _part("kv_cache_scheme", value["kv_cache_scheme"], "not supported: choose it here")
    plain, patterns = [], []
    for name in _names(value, "ignore"):
        if name.startswith("re:"):
            patterns.append(_pattern("ignore", f"^(?:{name[3:]})$"))
        else:
            plain.append(name)
    found = _compressed_format(str(form), weights)
    told = f"compressed-tensors, {form}"
    if isinstance(found, tuple):
        return told, QuantizationSpec(
            "fp8_block", found, tuple(plain), "weight_scale", patterns=tuple(patterns)
        )
    spec = QuantizationSpec("stored", plain=tuple(plain), stored=found, patterns=tuple(patterns))
    return told, spec


def _compressed_format(form: str, weights: Mapping[str, Any]) -> StoredFormat | tuple[int, int]:
    """The format of a matrix, or the blocks of one in e4m3."""
    strategy, kind = weights.get("strategy"), weights.get("type", "int")
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    if form == "nvfp4-pack-quantized":
        return StoredFormat("nvfp4", 4)
    if form == "mxfp4-pack-quantized":
        return StoredFormat("mxfp4", 4)
    if form == "float-quantized" and strategy == "block":
        return _pair("block_structure", weights.get("block_structure"))
    by_group = {"tensor": 0, "channel": None, "group": size}
    if strategy not in by_group:
        known = ", ".join(by_group)
        raise _part("config_groups.weights.strategy", strategy, f"not one of {known} for {form}")
    if strategy == "group" and (not isinstance(size, int) or size < 1):
        raise _part("config_groups.weights.group_size", size, "not a positive integer")
    group, zeros = by_group[strategy], weights.get("symmetric", True) is False
    ordered = weights.get("actorder") == "group"
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and group != 0:
        return StoredFormat("packed", bits, group, zeros, ordered)
    if form in ("int-quantized", "naive-quantized") and kind == "int" and bits == 8:
        return StoredFormat("int8", 8, group, zeros)
    if form in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        return StoredFormat("fp8", 8, group)
    raise _part("format", form, f"not supported with {bits} bits of {kind}, strategy {strategy}")


def _modelopt(value: Mapping[str, Any]) -> tuple[str, QuantizationSpec]:
    """ModelOpt's NVFP4, and its fp8 with a scale for a matrix."""
    algorithm = _one_of(value, "quant_algo", ("NVFP4", "FP8"))
    patterns = []
    for name in _names(value, "ignore", "exclude_modules"):
        wild = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", name))
        patterns.append(f"^{wild}(?:\\.|$)")
    stored = (
        StoredFormat("modelopt_nvfp4", 4) if algorithm == "NVFP4" else StoredFormat("fp8", group=0)
    )
    told = f"modelopt, {algorithm}"
    return told, QuantizationSpec("stored", stored=stored, patterns=tuple(patterns))


METHODS: dict[str | None, Callable[[Mapping[str, Any]], tuple[str, QuantizationSpec]]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}


def _known(value: Mapping[str, Any], name: str, known: tuple[object, ...]) -> None:
    if value.get(name) not in known:
        raise _part(name, value[name], "not supported")


def _one_of(value: Mapping[str, Any], name: str, known: tuple[Any, ...]) -> Any:
    found = value.get(name)
    if found not in known or isinstance(found, bool):
        raise _part(name, found, f"not one of {', '.join(str(one) for one in known if one)}")
    return found


def _group(value: Mapping[str, Any], name: str) -> int | None:
    """Columns of a group; None for -1, a whole row."""
    size = value.get(name)
    if size == -1:
        return None
    if not isinstance(size, int) or not _size(size):
        raise _part(name, size, "neither a positive integer nor -1")
    return size


def _names(value: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    for name in fields:
        found = value.get(name)
        if found is None:
            continue
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise _part(name, found, "not a list of names")
        return tuple(found)
    return ()


def _pattern(name: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise _part(name, text, f"not a regular expression: {error}") from None
    return text


def _pair(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(_size(n) for n in value):
        raise _part(name, value, "not two positive integers")
    return value[0], value[1]


def _size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def _part(name: str, value: Any, why: str) -> BadModel:
    return refuse(f"{FIELD}.{name}", value, why, SUPPORTED)
