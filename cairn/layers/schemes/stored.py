"""Matrices of quantised checkpoints: GPTQ, AWQ, compressed-tensors, fp8, NVFP4 and MXFP4.

Integers of 4 and 8 bits stay packed, in the layout of `cairn.ops.weight_only.layout`. Codes of 8
bits with a scale for each row, or one for the matrix, stay codes: on a device with tensor cores for
them tokens are rounded to 8 bits with a scale for each token, elsewhere, and in a float32 model,
matrices are dequantised and activations stay as they are. All other formats are dequantised when
they are read.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.norm import RMSNorm
from cairn.layers.schemes.base import (
    Chosen,
    PlainScheme,
    Rows,
    Scheme,
    at_rows,
    biased,
    leading,
    normed,
    reordered,
)
from cairn.layers.schemes.formats import Codes, Format, Integers, checked, format_of
from cairn.layers.weight import Index, Source, Weight
from cairn.ops import advice
from cairn.ops.quantization.codes import E4M3_MAX
from cairn.ops.weight_only import layout
from cairn.specs.quantization import QuantizationSpec, StoredFormat

if TYPE_CHECKING:
    from cairn.layers.linear import ExpertLinear, Linear

PACKED_BITS = (4, 8)


class OfCheckpoint:
    """What schemes of quantised checkpoints share: which of them a map has.

    Args:
        spec: the format, and what is not quantised.
        path: name of the module that the scheme is of.
    """

    def __init__(self, spec: QuantizationSpec, path: str = "") -> None:
        self.spec, self.path = spec, path
        self.format: Format = format_of(spec.stored or StoredFormat("fp8"))

    @property
    def unpacked(self) -> Scheme:
        """Matrices are dequantised when they are read."""
        return UnpackedScheme(self.spec, self.path)

    def within(self, name: str) -> Scheme:
        """Plain if the part is."""
        path = f"{self.path}.{name}" if self.path else name
        if self.spec.is_plain(path):
            return PlainScheme()
        return DequantisedScheme(self.spec, path)

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """Dequantised if some of the parts are plain, or if there is no product of their format."""
        name = f"{self.path}.0" if experts else self.path
        stored = self.format.stored
        if any(self.spec.is_plain(f"{name}.{part.name}") for part in parts):
            return UnpackedScheme(self.spec, self.path)
        if isinstance(self.format, Integers):
            if stored.bits in PACKED_BITS and not stored.ordered:
                return PackedScheme(self.spec, self.path)
        elif isinstance(self.format, Codes) and not stored.group and not stored.zeros:
            return (PackedCodesScheme if experts else CodesScheme)(self.spec, self.path)
        return DequantisedScheme(self.spec, self.path)


class DequantisedScheme(OfCheckpoint, PlainScheme):
    """Matrices in the model's dtype, dequantised when they are read."""

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """A matrix for each part, with its scales beside it."""
        name = self.path if expert is None else f"{self.path}.{expert}"
        found: list[Weight] = []
        for part, plain in zip(linear.parts, super().weights(linear, source, expert), strict=True):
            if self.spec.is_plain(f"{name}.{part.name}"):
                found.append(plain)
                continue
            first = source.name(f"{part.name}.")
            codes, *beside = self.format.tensors(first, *plain.shape)
            found.append(
                replace(
                    codes,
                    parameter=plain.parameter,
                    at=plain.at,
                    transform=_valued(self.format, codes.source, plain),
                    beside=tuple(beside),
                )
            )
            found += self.format.ignored(first)
        return found


def _valued(form: Format, name: str, plain: Weight) -> Callable[..., Tensor]:
    """The transform from stored tensors to what the plain matrix would fill."""

    def dequantise(*stored: Tensor) -> Tensor:
        found = checked(name, form.values)(*stored)
        return found if plain.transform is None else plain.transform(found)

    return dequantise


class UnpackedScheme(DequantisedScheme):
    """The same of every map."""

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """Itself."""
        return self


class KeptScheme(OfCheckpoint, Scheme):
    """Parameters of a map hold codes. What a device has no product for is dequantised first."""

    @abstractmethod
    def dequantised(
        self, linear: Linear | ExpertLinear, hit: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The matrix [out, in], or those [n, out, in] of some experts, or of all, rounded once."""

    def product(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """With the dequantised matrix."""
        x = normed(x, norm)
        return biased(ops.linear(x, self.dequantised(linear, None, x.dtype)), linear.bias)

    def experts(
        self, gate_up: ExpertLinear, down: ExpertLinear, x: Tensor, chosen: Chosen
    ) -> Tensor:
        """With dequantised matrices: on a GPU of all experts, as a graph of launches needs; else of
        those that are chosen."""
        hit: Tensor | None = None
        if not x.is_cuda:
            hit, ids = chosen.ids.long().unique(return_inverse=True)
            chosen = chosen._replace(ids=ids)
        first = self.dequantised(gate_up, hit, x.dtype)
        second = self.dequantised(down, hit, x.dtype)
        weights, ids, limit = chosen
        return ops.fused_experts(x, first, second, weights, ids, swiglu_limit=limit)


class PackedScheme(KeptScheme):
    """Integers of 4 or 8 bits in words, with scales and zero points of groups."""

    bits: int
    e4m3 = False
    """Codes are numbers."""

    def __init__(self, spec: QuantizationSpec, path: str = "") -> None:
        super().__init__(spec, path)
        self.bits = self.format.stored.bits

    def codes(self, stored: Tensor) -> Tensor:
        """[rows, columns], 0 .. 2^bits - 1, of what is stored."""
        return cast(Integers, self.format).codes(stored)

    def scales(self, stored: Tensor, rows: int) -> Tensor:
        """[G, rows] float32 of what is stored."""
        return cast(Integers, self.format).scales(stored)

    def groups(self, columns: int) -> int:
        """G."""
        return cast(Integers, self.format).groups(columns)

    def create(self, linear: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        """`words` [W, out], `scale` [G, out] float32 and perhaps `zero` [G, out] int16, or the same
        by expert."""
        lead, rows = leading(linear), linear.out_features
        groups, words = (
            self.groups(linear.in_features),
            layout.words_of(linear.in_features, self.bits),
        )
        linear.words = _parameter((*lead, words, rows), torch.int32)
        linear.scale = _parameter((*lead, groups, rows), torch.float32)
        if self.format.stored.zeros:
            linear.zero = _parameter((*lead, groups, rows), torch.int16)

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Codes, scales and zero points of each part."""
        found, start = [], 0
        for part in linear.parts:
            columns = slice(start, start + part.size)
            at: Index = (slice(None), columns) if expert is None else (expert, slice(None), columns)
            found += self._part(linear, part, source.name(f"{part.name}."), at)
            start += part.size
        return found

    def _part(
        self, linear: Linear | ExpertLinear, part: Rows, first: str, at: Index
    ) -> list[Weight]:
        size, order = part.size, part.order
        codes, scale, *rest = self.format.tensors(first, size, linear.in_features)

        def to_words(stored: Tensor) -> Tensor:
            own = self.codes(stored)
            return layout.to_words(own if order is None else reordered(own, order), self.bits)

        def ordered(values: Tensor) -> Tensor:
            return values if order is None else values.index_select(1, order.to(values.device))

        scales = checked(scale.source, lambda stored: ordered(self.scales(stored, size)))
        found = [
            replace(codes, parameter=linear.words, at=at, transform=to_words),
            replace(scale, parameter=linear.scale, at=at, transform=scales, draw="one"),
        ]
        if self.format.stored.zeros:
            form = cast(Integers, self.format)
            found.append(
                replace(
                    rest[0],
                    parameter=linear.zero,
                    at=at,
                    transform=lambda stored: ordered(form.zeros(stored)),
                    draw="one",
                )
            )
        return found + self.format.ignored(first)

    def product(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """With the words as they are."""
        x = normed(x, norm)
        rows = x.reshape(-1, linear.in_features)
        zero: Tensor | None = getattr(linear, "zero", None)
        y = ops.linear_packed(rows, linear.words, linear.scale, zero, self.bits)
        return biased(y.view(*x.shape[:-1], linear.out_features), linear.bias)

    def experts(
        self, gate_up: ExpertLinear, down: ExpertLinear, x: Tensor, chosen: Chosen
    ) -> Tensor:
        """With the words as they are on a GPU; elsewhere chosen experts are dequantised."""
        if not x.is_cuda or chosen.limit:
            return super().experts(gate_up, down, x, chosen)
        return self.packed_experts(gate_up, down, x, chosen)

    def packed_experts(
        self, gate_up: ExpertLinear, down: ExpertLinear, x: Tensor, chosen: Chosen
    ) -> Tensor:
        """Both products of every place, and the weighted sum."""
        weights, ids, _ = chosen
        gated = ops.silu_and_mul(self._of_experts(gate_up, x, ids, ids.shape[1]))
        y = self._of_experts(down, gated, ids, 1).view(*ids.shape, -1)
        return (y.float() * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def _of_experts(self, linear: ExpertLinear, x: Tensor, chosen: Tensor, share: int) -> Tensor:
        zero: Tensor | None = getattr(linear, "zero", None)
        given = (linear.words, linear.scale, zero, self.bits)
        return ops.experts_packed(x, *given, chosen, share, self.e4m3)

    def dequantised(
        self, linear: Linear | ExpertLinear, hit: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See the base."""
        words: Tensor = linear.words
        scale: Tensor = linear.scale
        zero: Tensor | None = getattr(linear, "zero", None)
        if hit is not None:
            words, scale, zero = words[hit], scale[hit], None if zero is None else zero[hit]
        given = (words, scale, zero, self.bits, linear.in_features)
        return ops.dequantize_packed(*given, dtype, self.e4m3)


class PackedCodesScheme(PackedScheme):
    """Codes of 8 bits with a scale for each row, of experts: in words, as integers of 8 bits are,
    for products of few tokens with each expert."""

    def __init__(self, spec: QuantizationSpec, path: str = "") -> None:
        super().__init__(spec, path)
        self.bits, self.e4m3 = 8, self.format.stored.layout == "fp8"

    def codes(self, stored: Tensor) -> Tensor:
        """Integers plus 128, or the bytes of e4m3."""
        return stored.view(torch.uint8).int() if self.e4m3 else stored.int() + 128

    def scales(self, stored: Tensor, rows: int) -> Tensor:
        """[1, rows]."""
        return cast(Codes, self.format).by_column(stored, rows, 1).t()

    def groups(self, columns: int) -> int:
        """One."""
        return 1


class CodesScheme(KeptScheme):
    """Codes of 8 bits with a scale for each row."""

    def create(self, linear: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        """`weight` [out, in] int8 or e4m3 and `scale` [out, 1] float32, or the same by expert."""
        lead, rows = leading(linear), linear.out_features
        kind = torch.int8 if self.format.stored.layout == "int8" else torch.float8_e4m3fn
        linear.weight = _parameter((*lead, rows, linear.in_features), kind)
        linear.scale = _parameter((*lead, rows, 1), torch.float32)

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Codes and scales of each part."""
        form, found, start = cast(Codes, self.format), [], 0
        for name, size, order in linear.parts:
            at, first = at_rows(expert, start, size), source.name(f"{name}.")
            codes, scale = form.tensors(first, size, linear.in_features)
            turned = None if order is None else functools.partial(_reordered_codes, order=order)
            found.append(replace(codes, parameter=linear.weight, at=at, transform=turned))

            def spread(stored: Tensor, size: int = size, order: Tensor | None = order) -> Tensor:
                own = form.by_column(stored, size, linear.in_features)
                return own if order is None else reordered(own, order)

            scales = checked(scale.source, spread)
            found.append(
                replace(scale, parameter=linear.scale, at=at, transform=scales, draw="one")
            )
            found += form.ignored(first)
            start += size
        return found

    def product(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """In 8 bits where the device multiplies so, each token with a scale; else with the matrix
        in x's dtype."""
        x = normed(x, norm)
        if not advice.multiplies_codes(x, linear.weight.dtype):
            return biased(ops.linear(x, self.dequantised(linear, None, x.dtype)), linear.bias)
        rows = x.reshape(-1, linear.in_features)
        if linear.weight.dtype == torch.int8:
            codes, scale = ops.per_token_quant_int8(rows)
            multiply = ops.int8_scaled_mm
        else:
            codes = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
            scale = torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
            ops.sgl_per_token_quant_fp8(rows, codes, scale)
            multiply = ops.fp8_scaled_mm
        y = multiply(codes, linear.weight.t(), scale, linear.scale, x.dtype, linear.bias)
        return y.view(*x.shape[:-1], linear.out_features)

    def dequantised(
        self, linear: Linear | ExpertLinear, hit: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See the base."""
        weight: Tensor = linear.weight
        scale: Tensor = linear.scale
        if hit is not None:
            weight, scale = _taken(weight, hit), scale[hit]
        return (weight.float() * scale).to(dtype)


class OnLoadScheme(CodesScheme):
    """Matrices that are quantised when they are read: e4m3 with a scale for each row."""

    def within(self, name: str) -> Scheme:
        """All parts are quantised."""
        return self

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """All maps are quantised; those of experts are kept in words."""
        return PackedOnLoadScheme(self.spec) if experts else self

    @property
    def unpacked(self) -> Scheme:
        """Matrices as they are."""
        return PlainScheme()

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Every stored matrix twice: its codes, and its scales."""
        found, start = [], 0
        for name, size, order in linear.parts:
            shape = (size, linear.in_features)
            plain = Weight(source.name(f"{name}.weight"), shape, None)
            found += _quantising(plain, linear, at_rows(expert, start, size), order)
            start += size
        return found

    def fused_weights(self, linear: ExpertLinear, source: Source) -> list[Weight]:
        """The same of one tensor for all experts."""
        shape = linear.experts, linear.out_features, linear.in_features
        return _quantising(Weight(source.name(linear.fused), shape, None), linear, ..., None)


class PackedOnLoadScheme(PackedCodesScheme):
    """The same of experts, in words."""

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """Itself."""
        return self

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Every stored matrix twice: its words, and its scales."""
        found, start = [], 0
        for name, size, order in linear.parts:
            plain = Weight(source.name(f"{name}.weight"), (size, linear.in_features), None)
            columns = slice(start, start + size)
            at: Index = (slice(None), columns) if expert is None else (expert, slice(None), columns)
            found += _in_words(_quantising(plain, linear, at, order), linear)
            start += size
        return found

    def fused_weights(self, linear: ExpertLinear, source: Source) -> list[Weight]:
        """The same of one tensor for all experts."""
        shape = linear.experts, linear.out_features, linear.in_features
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
    codes = replace(plain, parameter=weight, at=at, transform=codes_of)
    return [codes, replace(plain, parameter=linear.scale, at=at, transform=scale_of, draw="one")]


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


def _taken(codes: Tensor, hit: Tensor) -> Tensor:
    """codes[hit]; not every device indexes float8."""
    return codes.view(torch.uint8)[hit].view(codes.dtype)


def _reordered_codes(stored: Tensor, order: Tensor) -> Tensor:
    return reordered(stored.view(torch.uint8), order).view(stored.dtype)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
