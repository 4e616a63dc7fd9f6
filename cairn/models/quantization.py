"""`quantization_config` of a config.json: which quantised checkpoints can be read."""

from __future__ import annotations

from typing import Any

from cairn.errors import BadModel
from cairn.models.fields import ConfigFields, refuse
from cairn.specs.model import QuantizationSpec

FIELD = "quantization_config"
PUBLISHED_BLOCK = (128, 128)
SUPPORTED = "Supported: fp8 in e4m3 with weight_block_size, dynamic activations"


def fp8_blocks(f: ConfigFields) -> QuantizationSpec | None:
    """How the matrices of a checkpoint are quantised: not at all, or e4m3 with a scale a block.

    Scales tell their own format, so `scale_fmt` has no effect. Modules that
    `modules_to_not_convert` names are not quantised.

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
    if method != "fp8":
        raise refuse(FIELD, method, "quantised weights of this method are not supported", SUPPORTED)
    for name, known in (
        ("fmt", ("e4m3", None)),
        ("activation_scheme", ("dynamic", None)),
        ("scale_fmt", ("ue8m0", "float", None)),
    ):
        if value.get(name) not in known:
            raise _part(name, value[name], "not supported")
    block = value.get("weight_block_size", list(PUBLISHED_BLOCK))
    whole = isinstance(block, list) and len(block) == 2 and all(_size(n) for n in block)
    if not whole:
        raise _part("weight_block_size", block, "not two positive integers")
    plain = value.get("modules_to_not_convert") or []
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise _part("modules_to_not_convert", plain, "not a list of names")
    f.record(FIELD, f"fp8, blocks of {block[0]} x {block[1]}", f.source(FIELD))
    return QuantizationSpec("fp8_block", (block[0], block[1]), tuple(plain))


def _size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def _part(name: str, value: Any, why: str) -> BadModel:
    return refuse(f"{FIELD}.{name}", value, why, SUPPORTED)
