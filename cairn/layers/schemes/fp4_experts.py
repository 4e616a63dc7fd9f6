"""Matrices of experts in fp4, dequantised when they are read.

A byte holds two e2m1 codes (OCP Microscaling Formats 1.0, section 5.3.3), that of the even column
in its low half; every 32 columns of a row share a scale in e8m0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cairn.layers.schemes.base import PlainScheme
from cairn.layers.schemes.fp8_block import decode_scale
from cairn.layers.weight import Source, Weight
from cairn.ops.quantization import nvfp4

if TYPE_CHECKING:
    from cairn.layers.linear import ExpertLinear, Linear

COLUMNS = 32
"""That share a scale."""


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
        rows, columns = plain.shape
        name = plain.source.removesuffix("weight") + self.scale_name
        scales = Weight(name, (rows, -(-columns // COLUMNS)), None, dtypes=("F8_E8M0", "U8"))

        def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
            by_column = decode_scale(scale, name).repeat_interleave(COLUMNS, dim=1)
            matrix = nvfp4.unpacked(stored.view(torch.uint8)) * by_column[:, :columns]
            return matrix if plain.transform is None else plain.transform(matrix)

        return replace(
            plain,
            shape=(rows, columns // 2),
            transform=dequantise,
            dtypes=("I8", "U8"),
            beside=(scales,),
            whole=True,
        )
