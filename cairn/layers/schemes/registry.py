"""Schemes by the names that a model's quantisation gives them."""

from __future__ import annotations

from cairn.layers.schemes.base import PlainScheme, Scheme
from cairn.layers.schemes.fp8_block import Fp8BlockScheme
from cairn.specs.model import QuantizationSpec


def scheme_of(quantization: QuantizationSpec | None) -> Scheme:
    """How the matrices of a model are kept; plain without a quantisation."""
    if quantization is None:
        return PlainScheme()
    return {"fp8_block": Fp8BlockScheme}[quantization.scheme](quantization.block)
