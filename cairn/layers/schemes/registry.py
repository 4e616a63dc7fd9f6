"""Schemes by the names that a model's quantisation gives them."""

from __future__ import annotations

from dataclasses import replace

from cairn.layers.schemes.base import PlainScheme, Scheme
from cairn.layers.schemes.fp4_experts import Fp4AtLoad, Fp4Scheme
from cairn.layers.schemes.fp8_block import Fp8BlockScheme
from cairn.layers.schemes.on_load import OnLoadScheme
from cairn.layers.schemes.stored import DequantisedScheme
from cairn.specs.quantization import QuantizationSpec

NESTED = "language_model."
"""In the names of a text model that is a part of another."""


def scheme_of(quantization: QuantizationSpec | None) -> Scheme:
    """How the matrices of a model are kept, by the names of its modules; plain without a
    quantisation."""
    if quantization is None:
        return PlainScheme()
    # A text model within another one is sometimes listed as if it stood alone.
    plain = frozenset(name.replace(NESTED, "") for name in quantization.plain)
    if quantization.scheme == "fp8_block":
        experts: Scheme | None = None
        if quantization.experts == "fp4":
            kept = Fp4Scheme if quantization.packed else Fp4AtLoad
            experts = kept(quantization.scale_name)
        return Fp8BlockScheme(
            quantization.block,
            plain,
            quantization.scale_name,
            quantization.patterns,
            own_experts=experts,
        )
    named = replace(quantization, plain=tuple(sorted(plain)))
    return (OnLoadScheme if quantization.scheme == "on_load" else DequantisedScheme)(named)


def scheme_within(scheme: Scheme, prefix: str) -> Scheme:
    """The scheme of the module whose tensors' names begin so."""
    for name in prefix.replace(NESTED, "").rstrip(".").split("."):
        scheme = scheme.within(name)
    return scheme
