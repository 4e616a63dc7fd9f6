"""Matrices of plain checkpoints that are quantised when they are read: e4m3 with a scale a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cairn.layers.schemes.base import PlainScheme, Rows, Scheme, at_rows, reordered
from cairn.layers.schemes.stored import CodesScheme, PackedCodesScheme
from cairn.layers.weight import Index, Source, Weight
from cairn.ops.quantization.codes import E4M3_MAX
from cairn.ops.weight_only import layout

if TYPE_CHECKING:
    from cairn.layers.linear import ExpertLinear, Linear


class OnLoadScheme(CodesScheme):
    """Matrices that are quantised when they are read: e4m3 with a scale for each row."""

    def within(self, name: str) -> Scheme:
        """All parts are quantised."""
        return self

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """All maps are quantised; those of experts are packed into words."""
        return PackedOnLoadScheme(self.spec) if experts else self

    @property
    def unpacked(self) -> Scheme:
        """Matrices as they are."""
        return PlainScheme()

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Two weights from every stored matrix: its codes and its scales."""
        found, start = [], 0
        for name, size, order, *_ in linear.parts:
            shape = (size, linear.in_features)
            plain = Weight(source.name(f"{name}.weight"), shape, None)
            found += _quantising(plain, linear, at_rows(expert, start, size), order)
            start += size
        return found

    def fused_weights(self, linear: ExpertLinear, source: Source) -> list[Weight]:
        """The same of one tensor for all experts."""
        shape = linear.routed, linear.out_features, linear.in_features
        return _quantising(Weight(source.name(linear.fused), shape, None), linear, ..., None)


class PackedOnLoadScheme(PackedCodesScheme):
    """`OnLoadScheme` for experts, whose codes are packed into words."""

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """Itself."""
        return self

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Two weights from every stored matrix: its words and its scales."""
        found, start = [], 0
        for name, size, order, *_ in linear.parts:
            plain = Weight(source.name(f"{name}.weight"), (size, linear.in_features), None)
            columns = slice(start, start + size)
            at: Index = (slice(None), columns) if expert is None else (expert, slice(None), columns)
            found += _in_words(_quantising(plain, linear, at, order), linear)
            start += size
        return found

    def fused_weights(self, linear: ExpertLinear, source: Source) -> list[Weight]:
        """The same of one tensor for all experts."""
        shape = linear.routed, linear.out_features, linear.in_features
        plain = Weight(source.name(linear.fused), shape, None)
        return _in_words(_quantising(plain, linear, ..., None), linear)


def _quantising(
    plain: Weight, linear: Linear | ExpertLinear, at: Index, order: Tensor | None
) -> list[Weight]:
    """What fills `weight` [.., out, in] and `scale` [.., out, 1] from a plain matrix."""

    def rows_of(stored: Tensor) -> Tensor:
        return stored.float() if order is None else reordered(stored.float(), order)

    def scale_of(stored: Tensor) -> Tensor:
        return rows_of(stored).abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX

    def codes_of(stored: Tensor) -> Tensor:
        scaled = rows_of(stored) / scale_of(stored)
        return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    weight = getattr(linear, "weight", None)
    # A rank's part has the scales that it has in the whole matrix.
    codes = replace(plain, parameter=weight, at=at, transform=codes_of, whole=True)
    return [codes, replace(codes, parameter=linear.scale, transform=scale_of, draw="one")]


def _in_words(quantising: list[Weight], linear: Linear | ExpertLinear) -> list[Weight]:
    """The same for `words` [.., W, out] and `scale` [.., 1, out]."""
    codes, scale = quantising
    codes_of, scale_of = codes.transform, scale.transform
    assert codes_of is not None and scale_of is not None

    def words(stored: Tensor) -> Tensor:
        return layout.to_words(codes_of(stored).view(torch.uint8).int(), 8)

    def across(stored: Tensor) -> Tensor:
        return scale_of(stored).transpose(-1, -2)

    return [
        replace(codes, parameter=linear.words, transform=words),
        replace(scale, transform=across),
    ]
