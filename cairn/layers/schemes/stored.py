"""Matrices of quantised checkpoints: GPTQ, AWQ, compressed-tensors, fp8, NVFP4 and MXFP4.

Integers of 4 and 8 bits stay packed, in the layout of `cairn.ops.weight_only.layout`. Codes of 8
bits with a scale for each row, or one for the matrix, are kept too: on a device with tensor cores
for them activations are rounded to 8 bits with a scale for each token; elsewhere, and in a float32
model, matrices are dequantised for each product and activations are not rounded. All other formats
are dequantised at load.
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
from cairn.errors import BadConfig, BadModel
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
from cairn.ops import planning
from cairn.ops.weight_only import layout
from cairn.specs.quantization import QuantizationSpec, StoredFormat

if TYPE_CHECKING:
    from cairn.layers.linear import ExpertLinear, Linear

PACKED_BITS = (4, 8)


class OfCheckpoint:
    """Base of the schemes of quantised checkpoints; chooses the scheme of each linear map.

    Args:
        spec: the format, and which modules are not quantised.
        path: name of the module that the scheme belongs to.
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
        """A scheme that keeps codes, if all parts are quantised in a format that ops multiply; else
        one that dequantises at load."""
        name = f"{self.path}.0" if experts else self.path
        stored = self.format.stored
        if any(self.spec.is_plain(f"{name}.{part.name}") for part in parts):
            return UnpackedScheme(self.spec, self.path)
        if isinstance(self.format, Integers):
            if stored.bits in PACKED_BITS:
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
                    whole=True,
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
    """`DequantisedScheme` for every map, whatever its format."""

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """Itself."""
        return self


class KeptScheme(Scheme):
    """Keeps a map's codes as its parameters. Products dequantise them, unless a subclass has a
    kernel that multiplies codes."""

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
        """With dequantised matrices: on a GPU those of all experts, since the host does not know
        which are chosen; on a CPU those of the chosen ones."""
        hit: Tensor | None = None
        if not x.is_cuda:
            hit, chosen = chosen.among_chosen()
        first = self.dequantised(gate_up, hit, x.dtype)
        second = self.dequantised(down, hit, x.dtype)
        weights, ids, limit = chosen
        return ops.fused_experts(x, first, second, weights, ids, swiglu_limit=limit)


class PackedScheme(OfCheckpoint, KeptScheme):
    """Integers of 4 or 8 bits in words, with scales and zero points of groups."""

    bits: int
    e4m3 = False
    """Codes are e4m3 numbers, not integers."""

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
        by expert; with act order `order` [in] int32: columns of x in the order of groups."""
        lead, rows = leading(linear), linear.out_features
        groups, words = (
            self.groups(linear.in_features),
            layout.words_of(linear.in_features, self.bits),
        )
        linear.words = parameter((*lead, words, rows), torch.int32)
        linear.scale = parameter((*lead, groups, rows), torch.float32)
        if self.format.stored.zeros:
            linear.zero = parameter((*lead, groups, rows), torch.int16)
        if self.format.stored.ordered:
            linear.order = parameter((*lead, linear.in_features), torch.int32)

    def divide(self, own: Linear | ExpertLinear, whole: Linear | ExpertLinear) -> None:
        """Raises BadConfig where a division would cut groups of columns; with act order every
        division does."""
        columns, group = own.in_features, self.format.stored.group
        if columns == whole.in_features:
            return
        ordered = self.format.stored.ordered
        if ordered or (group and columns % group):
            how = "in act order" if ordered else f"in groups of {group}"
            raise BadConfig(
                f"the {whole.in_features} columns of {self.path}.{whole.parts[0].name} are {how} "
                f"and cannot be divided into {columns}",
                "Use fewer ranks (--tensor-parallel-size)",
            )

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
        if self.format.stored.ordered:
            first = source.name(f"{linear.parts[0].name}.")
            groups = self.format.tensors(first, linear.parts[0].size, linear.in_features)[-1]
            # g_idx is stored once for a joint matrix; the codes of all its parts use it.
            found = [self._beside(one, groups) for one in found]
            whole: Index = ... if expert is None else expert
            order = functools.partial(self.order_of, name=groups.source)
            found.append(
                replace(groups, parameter=linear.order, at=whole, transform=order, draw="one")
            )
        return found

    def _beside(self, weight: Weight, groups: Weight) -> Weight:
        return replace(weight, beside=(*weight.beside, groups)) if weight.beside else weight

    def order_of(self, groups: Tensor, name: str) -> Tensor:
        """Columns [in], sorted by group. Raises BadModel unless all groups are of one size."""
        order = torch.argsort(groups, stable=True)
        size = self.format.stored.group or len(groups)
        if not torch.equal(groups[order].long(), _counted(groups) // size):
            raise BadModel(
                f"{name} does not give every group {size} columns", "Quantise it with whole groups"
            )
        return order.int()

    def _part(
        self, linear: Linear | ExpertLinear, part: Rows, first: str, at: Index
    ) -> list[Weight]:
        size, order = part.size, part.order
        codes, scale, *rest = self.format.tensors(first, size, linear.in_features)

        def to_words(stored: Tensor, *groups: Tensor) -> Tensor:
            own = self.codes(stored)
            if groups:
                if not torch.equal(*groups):
                    raise BadModel(
                        f"{rest[-1].source} differs from that of another map of the same input",
                        "Quantise maps of the same input with one order",
                    )
                own = own.index_select(1, self.order_of(groups[0], rest[-1].source))
            return layout.to_words(own if order is None else reordered(own, order), self.bits)

        def ordered(values: Tensor) -> Tensor:
            return values if order is None else values.index_select(1, order.to(values.device))

        scales = checked(scale.source, lambda stored: ordered(self.scales(stored, size)))
        found = [
            replace(codes, parameter=linear.words, at=at, transform=to_words),
            replace(scale, parameter=linear.scale, at=at, transform=scales, draw="one"),
        ]
        if self.format.stored.ordered:
            found[0] = replace(found[0], beside=(rest[-1],))
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
        """By `ops.linear_packed`."""
        x = normed(x, norm)
        rows = x.reshape(-1, linear.in_features)
        if self.format.stored.ordered:
            rows = rows.index_select(1, linear.order)
        zero: Tensor | None = getattr(linear, "zero", None)
        y = ops.linear_packed(rows, linear.words, linear.scale, zero, self.bits)
        return biased(y.view(*x.shape[:-1], linear.out_features), linear.bias)

    def experts(
        self, gate_up: ExpertLinear, down: ExpertLinear, x: Tensor, chosen: Chosen
    ) -> Tensor:
        """By `ops.experts_packed` on a GPU; elsewhere chosen experts are dequantised."""
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
        if self.format.stored.ordered:
            order = linear.order[chosen.flatten().clamp(min=0).long()]
            x, share = x.repeat_interleave(share, dim=0).gather(1, order.long()), 1
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
        found: Tensor = ops.dequantize_packed(*given, dtype, self.e4m3)
        if not self.format.stored.ordered:
            return found
        order: Tensor = linear.order if hit is None else linear.order[hit]
        return found.gather(-1, order.long().argsort(dim=-1).unsqueeze(-2).expand_as(found))


class PackedCodesScheme(PackedScheme):
    """Experts' matrices of 8-bit codes with a scale for each row, packed into words, which
    `ops.experts_packed` multiplies."""

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


class CodesScheme(OfCheckpoint, KeptScheme):
    """Codes of 8 bits with a scale for each row."""

    def create(self, linear: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        """`weight` [out, in] int8 or e4m3 and `scale` [out, 1] float32, or the same by expert."""
        lead, rows = leading(linear), linear.out_features
        kind = torch.int8 if self.format.stored.layout == "int8" else torch.float8_e4m3fn
        linear.weight = parameter((*lead, rows, linear.in_features), kind)
        linear.scale = parameter((*lead, rows, 1), torch.float32)

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """Codes and scales of each part."""
        form, found, start = cast(Codes, self.format), [], 0
        for name, size, order, *_ in linear.parts:
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
        if not planning.supports_8bit_gemm(x, linear.weight.dtype):
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


def _counted(x: Tensor) -> Tensor:
    """0, 1, .. len(x) - 1."""
    return torch.arange(len(x), device=x.device)


def _taken(codes: Tensor, hit: Tensor) -> Tensor:
    """codes[hit]; not every device indexes float8."""
    return codes.view(torch.uint8)[hit].view(codes.dtype)


def _reordered_codes(stored: Tensor, order: Tensor) -> Tensor:
    return reordered(stored.view(torch.uint8), order).view(stored.dtype)


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Uninitialised numbers, for a loader to write."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
