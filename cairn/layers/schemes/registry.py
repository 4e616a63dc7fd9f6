"""Schemes by the names that a model's quantisation gives them."""

from __future__ import annotations

from cairn.layers.schemes.base import PlainScheme, Scheme
from cairn.layers.schemes.fp8_block import Fp8BlockScheme
from cairn.specs.model import QuantizationSpec

NESTED = "language_model."
"""In the names of a text model that is a part of another."""


def scheme_of(quantization: QuantizationSpec | None) -> Scheme:
    """How the matrices of a model are kept, by the names of its modules; plain without a
    quantisation."""
    if quantization is None:
        return PlainScheme()
    # A text model within another one is sometimes listed as if it stood alone.
    plain = frozenset(name.replace(NESTED, "") for name in quantization.plain)
    return {"fp8_block": Fp8BlockScheme}[quantization.scheme](quantization.block, plain)


def scheme_within(scheme: Scheme, prefix: str) -> Scheme:
    """The scheme of the module whose tensors' names begin so."""
    for name in prefix.replace(NESTED, "").rstrip(".").split("."):
        scheme = scheme.within(name)
    return scheme
