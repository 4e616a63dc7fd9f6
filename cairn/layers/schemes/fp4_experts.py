"""Matrices of experts in fp4, dequantised when they are read from a file or when they run.

A byte holds two e2m1 codes (OCP Microscaling Formats 1.0, section 5.3.3), that of the even column
in its low half; every 32 columns of a row share a scale in e8m0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cairn.errors import BadConfig
from cairn.layers.schemes.base import PlainScheme, Scheme, at_rows, leading
from cairn.layers.schemes.fp8_block import decode_scale
from cairn.layers.schemes.stored import KeptScheme, parameter
from cairn.layers.weight import Source, Weight
from cairn.ops.quantization import e8m0, nvfp4

if TYPE_CHECKING:
    from cairn.layers.linear import ExpertLinear, Linear

COLUMNS = 32
"""Columns that share a scale."""


class Fp4AtLoad(PlainScheme):
    """Matrices in the model's dtype, from checkpoints that hold them in fp4.

    Args:
        scale_name: of a matrix's scales, in the place of "weight".
    """

    def __init__(self, scale_name: str) -> None:
        self.scale_name = scale_name

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """A matrix of codes for each part, with its scales beside it."""
        return [self._coded(weight) for weight in super().weights(linear, source, expert)]

    def _coded(self, plain: Weight) -> Weight:
        codes, scales = stored_as(plain, self.scale_name)

        def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
            matrix = valued(stored.view(torch.uint8), decode_scale(scale, scales.source))
            return matrix if plain.transform is None else plain.transform(matrix)

        return replace(codes, transform=dequantise, beside=(scales,), whole=True)


class Fp4Scheme(KeptScheme):
    """Matrices as such checkpoints hold them: an eighth of the memory that they take in float32.

    Args:
        scale_name: of a matrix's scales, in the place of "weight".
    """

    def __init__(self, scale_name: str) -> None:
        self.scale_name = scale_name

    @property
    def unpacked(self) -> Scheme:
        """Matrices are dequantised when they are read."""
        return Fp4AtLoad(self.scale_name)

    def divide(self, own: Linear | ExpertLinear, whole: Linear | ExpertLinear) -> None:
        """Columns that share a scale stay together."""
        if own.in_features != whole.in_features and own.in_features % COLUMNS:
            raise BadConfig(
                f"{whole.in_features} columns with a scale for every {COLUMNS} cannot be divided "
                f"into {own.in_features}",
                "Use fewer ranks (--tensor-parallel-size)",
            )

    def create(self, linear: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        """`weight` [out, in / 2] uint8, two codes a byte, and `scale` [out, in / 32] uint8, in
        e8m0; or both by expert."""
        lead, columns = (*leading(linear), linear.out_features), linear.in_features
        linear.weight = parameter((*lead, columns // 2), torch.uint8)
        linear.scale = parameter((*lead, -(-columns // COLUMNS)), torch.uint8)

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Codes and scales of each part."""
        found, start = [], 0
        for name, size, *_ in linear.parts:
            at = at_rows(expert, start, size)
            shape = size, linear.in_features
            plain = Weight(source.name(f"{name}.weight"), shape, linear.weight, at)
            codes, scales = stored_as(plain, self.scale_name)

            def finite(stored: Tensor, name: str = scales.source) -> Tensor:
                decode_scale(stored, name)
                return stored.view(torch.uint8)

            found.append(replace(codes, transform=lambda stored: stored.view(torch.uint8)))
            found.append(replace(scales, parameter=linear.scale, at=at, transform=finite))
            start += size
        return found

    def dequantised(
        self, linear: Linear | ExpertLinear, hit: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See the base."""
        codes: Tensor = linear.weight
        scale: Tensor = linear.scale
        if hit is not None:
            codes, scale = codes[hit], scale[hit]
        return valued(codes, e8m0.decode(scale)).to(dtype)


def stored_as(plain: Weight, scale_name: str) -> tuple[Weight, Weight]:
    """The codes of a matrix [out, in] and its scales, as a checkpoint holds them."""
    rows, columns = plain.shape
    name = plain.source.removesuffix("weight") + scale_name
    scales = Weight(name, (rows, -(-columns // COLUMNS)), None, dtypes=("F8_E8M0", "U8"))
    return replace(plain, shape=(rows, columns // 2), dtypes=("I8", "U8")), scales


def valued(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [.., out, in] of bytes [.., out, in / 2] and scales [.., out, in / 32] float32."""
    values = nvfp4.unpacked(codes)
    return values * scale.repeat_interleave(COLUMNS, dim=-1)[..., : values.shape[-1]]
