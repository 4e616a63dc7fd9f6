"""Matrices in 8 bits (e4m3) with a scale for each block, as DeepSeek-V3 publishes them.

w[i, j] = fp8[i, j] * scale[i // rows, j // columns]. On a device with tensor cores for fp8 products
are computed in it, and activations are rounded to e4m3 with a scale for every 128 numbers of a
token; elsewhere, and in a float32 model, matrices are dequantised and activations stay as they are.
Scales are stored as float32, or as e8m0: a byte e for 2^(e - 127), which some files call uint8.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.errors import BadModel
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
)
from cairn.layers.weight import WHOLE, Index, Source, Weight
from cairn.ops import planning
from cairn.ops.quantization import e8m0

if TYPE_CHECKING:
    from cairn.layers.linear import ExpertLinear, Linear

SCALE_DTYPES = ("F32", "BF16", "F8_E8M0", "U8")


class Fp8BlockScheme(Scheme):
    """e4m3 values with a scale for every block of (rows, columns).

    A map is dequantised at load if one of its stored matrices is not quantised, or if its parts do
    not begin at the border of a block of rows.

    Args:
        block: rows and columns that share a scale.
        plain: names of modules, within the one that the scheme is of, that are not quantised.
        scale_name: of a matrix's scales.
        patterns: regular expressions of names of further modules that are not quantised.
        path: name of the module that the scheme is of.
        own_experts: the scheme of experts; None: this one.
        stored_block: rows and columns that share a scale in the checkpoint, multiples of those of
            `block`; None: as many.
    """

    def __init__(
        self,
        block: tuple[int, int],
        plain: frozenset[str] = frozenset(),
        scale_name: str = "weight_scale_inv",
        patterns: tuple[str, ...] = (),
        path: str = "",
        own_experts: Scheme | None = None,
        stored_block: tuple[int, int] | None = None,
    ) -> None:
        self.block, self.plain, self.scale_name = block, plain, scale_name
        self.patterns, self.path, self.own_experts = patterns, path, own_experts
        self.stored_block = stored_block or block

    @property
    def unpacked(self) -> Scheme:
        """Matrices are dequantised when they are read."""
        return Fp8BlockAtLoad(self)

    def within(self, name: str) -> Scheme:
        """Plain if the part is."""
        path = f"{self.path}.{name}" if self.path else name
        if name in self.plain or self.matches(path):
            return PlainScheme()
        inside = (x.removeprefix(f"{name}.") for x in self.plain if x.startswith(f"{name}."))
        given = (self.scale_name, self.patterns, path, self.own_experts)
        return Fp8BlockScheme(self.block, frozenset(inside), *given)

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """This scheme if every stored matrix is quantised and its blocks of rows are blocks of the
        map; else `unpacked`."""
        if experts and self.own_experts is not None:
            return self.own_experts
        whole = experts or all(part.size % self.block[0] == 0 for part in parts[:-1])
        in_order = all(part.order is None for part in parts)
        if whole and in_order and not any(self.is_plain(part.name) for part in parts):
            return self
        return self.unpacked

    def matches(self, path: str) -> bool:
        """Whether a pattern says that a module is not quantised."""
        return any(re.search(pattern, path) for pattern in self.patterns)

    def is_plain(self, part: str) -> bool:
        """Whether a matrix of this module, or of an expert of it, is not quantised."""
        names = {name.rpartition(".")[2] for name in self.plain}
        return part in names or self.matches(f"{self.path}.{part}")

    def fused_weights(self, linear: ExpertLinear, source: Source) -> list[Weight]:
        """A tensor of matrices and one of scales, both of all experts."""
        shape = linear.routed, linear.out_features, linear.in_features
        matrices, scales = (source.name(linear.fused + end) for end in ("", "_scale_inv"))
        sizes = tuple(part.size for part in linear.parts)
        return [
            Weight(matrices, shape, linear.weight, dtypes=("F8_E4M3",)),
            self._scales(linear, scales, sizes, lead=(linear.routed,)),
        ]

    def joins(self, other: Scheme, width: int) -> bool:
        """If blocks are alike, and no block is of two experts."""
        if not isinstance(other, Fp8BlockScheme):
            return False
        alike = (self.block, self.scale_name) == (other.block, other.scale_name)
        return alike and all(width % size == 0 for size in self.block)

    def create(self, linear: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        """`weight` [out, in] e4m3 and `scale` [blocks of rows, blocks of columns] float32, or the
        same by expert; every stored matrix begins a block of rows."""
        lead = leading(linear)
        shape = *lead, linear.out_features, linear.in_features
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        rows, columns = self._grid([part.size for part in linear.parts], linear)
        scale = torch.empty(*lead, rows, columns, dtype=torch.float32)
        linear.scale = nn.Parameter(scale, requires_grad=False)

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """A matrix and its scales for each part."""
        found, start, first = [], 0, 0
        for name, size, *_ in linear.parts:
            shape, at = (size, linear.in_features), at_rows(expert, start, size)
            matrix = source.name(f"{name}.weight")
            found.append(Weight(matrix, shape, linear.weight, at, dtypes=("F8_E4M3",)))
            scales, rows = source.name(f"{name}.{self.scale_name}"), self._grid([size], linear)[0]
            found.append(self._scales(linear, scales, (size,), at_rows(expert, first, rows)))
            start, first = start + size, first + rows
        return found

    def _scales(
        self,
        linear: Linear | ExpertLinear,
        name: str,
        sizes: tuple[int, ...],
        at: Index = WHOLE,
        lead: tuple[int, ...] = (),
    ) -> Weight:
        """Scales of matrices with so many rows each, one below the other."""
        decode = functools.partial(decode_scale, name=name)
        transform: Callable[[Tensor], Tensor] = decode
        if self.block != self.stored_block:
            # A rank's rows or columns may begin inside a stored block: scales are expanded to
            # smaller blocks first, and then divided.
            def transform(stored: Tensor) -> Tensor:
                return self._split(decode(stored), sizes, linear)

        return Weight(
            name,
            (*lead, *self._grid(sizes, linear, self.stored_block)),
            linear.scale,
            at,
            transform=transform,
            whole=self.block != self.stored_block,
            draw="one",
            dtypes=SCALE_DTYPES,
        )

    def _split(self, scale: Tensor, sizes: Sequence[int], linear: Linear | ExpertLinear) -> Tensor:
        """Scales of stored blocks [..., rows, columns], repeated for the smaller blocks inside."""
        stored = [self._grid([size], linear, self.stored_block)[0] for size in sizes]
        parts = list(scale.split(stored, dim=-2))
        for at, size in enumerate(sizes):
            rows, columns = self._grid([size], linear)
            for axis, kept in ((-2, rows), (-1, columns)):
                ratio = self.stored_block[axis] // self.block[axis]
                parts[at] = parts[at].repeat_interleave(ratio, axis).narrow(axis, 0, kept)
        return torch.cat(parts, dim=-2)

    def divide(self, own: Linear | ExpertLinear, whole: Linear | ExpertLinear) -> None:
        """Where a division would cut blocks, both maps get smaller blocks that it does not cut.
        Each has the scale of the stored block it lies in, so values do not change."""
        if not isinstance(own.scheme, Fp8BlockScheme):
            # The parts of a rank are not whole blocks: all ranks dequantise.
            whole.scheme = own.scheme
            whole.scheme.create(whole, own.weight.dtype)
            return
        sizes = [(a.size, b.size) for a, b in zip(own.parts, whole.parts, strict=True)]
        columns = [(own.in_features, whole.in_features)]
        smaller = _uncut(self.block[0], sizes), _uncut(self.block[1], columns)
        if smaller == self.block:
            return
        given = self.plain, self.scale_name, self.patterns, self.path, self.own_experts
        scheme = Fp8BlockScheme(smaller, *given, stored_block=self.stored_block)
        for linear in (own, whole):
            linear.scheme = scheme
            scheme.create(linear, linear.weight.dtype)

    def product(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """In fp8 where the device multiplies so, x rounded by groups of 128 numbers; else the
        matrix is dequantised to x's dtype."""
        x = normed(x, norm)
        if planning.supports_fp8_experts(x, self.block):
            rows = x.reshape(-1, linear.in_features)
            y = ops.linear_fp8_blocks(rows, linear.weight, linear.scale)
            y = y.view(*x.shape[:-1], linear.out_features)
        else:
            y = ops.linear(x, self.dequantised(linear, x.dtype))
        return biased(y, linear.bias)

    def experts(
        self, gate_up: ExpertLinear, down: ExpertLinear, x: Tensor, chosen: Chosen
    ) -> Tensor:
        """As `product`. Where matrices are dequantised, on a CPU only those of chosen experts
        are."""
        weights, ids, limit = chosen
        after = down.scheme
        assert isinstance(after, Fp8BlockScheme)
        if all(planning.supports_fp8_experts(x, scheme.block) for scheme in (self, after)):
            return ops.fused_experts(
                x,
                gate_up.weight,
                down.weight,
                weights,
                ids,
                w1_scale=gate_up.scale,
                w2_scale=down.scale,
                swiglu_limit=limit,
            )
        if x.is_cuda:
            # Which are chosen is not known to the host.
            hit = torch.arange(gate_up.experts, device=x.device)
        else:
            hit, (weights, ids, limit) = chosen.among_chosen()
        first = self._dequantised_experts(gate_up, hit, x.dtype)
        second = after._dequantised_experts(down, hit, x.dtype)
        return ops.fused_experts(x, first, second, weights, ids, swiglu_limit=limit)

    def _dequantised_experts(self, linear: ExpertLinear, hit: Tensor, dtype: torch.dtype) -> Tensor:
        scale = self._by_element(linear, linear.scale[hit])
        return (linear.weight[hit].float() * scale).to(dtype)

    def dequantised(self, linear: Linear, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in] in `dtype`, rounded once."""
        return (linear.weight.float() * self._by_element(linear, linear.scale)).to(dtype)

    def _by_element(self, linear: Linear | ExpertLinear, scale: Tensor) -> Tensor:
        """Scales [..., blocks of rows, blocks of columns] for every element [..., out, in]."""
        block_of, first = [], 0
        for _, size, *_ in linear.parts:
            block_of.append(torch.arange(size, device=scale.device) // self.block[0] + first)
            first += self._grid([size], linear)[0]
        scale = scale.index_select(-2, torch.cat(block_of))
        return scale.repeat_interleave(self.block[1], dim=-1)[..., : linear.in_features]

    def _grid(
        self,
        sizes: Sequence[int],
        linear: Linear | ExpertLinear,
        block: tuple[int, int] | None = None,
    ) -> tuple[int, int]:
        """Rows and columns of the scales of matrices with so many rows each."""
        rows, columns = block or self.block
        return sum(-(-size // rows) for size in sizes), -(-linear.in_features // columns)


def _uncut(block: int, sizes: Sequence[tuple[int, int]]) -> int:
    """The size of the largest blocks, of which blocks of a size consist, that no division cuts.

    Args:
        sizes: of a rank's part and of the whole of each matrix, along an axis.
    """
    for part, whole in sizes:
        # No smaller blocks where parts are whole blocks, or lie inside one block.
        if part != whole and whole > block and (block % part or whole % block):
            block = math.gcd(block, part)
    return block


class Fp8BlockAtLoad(PlainScheme):
    """Matrices of the same checkpoints in the model's dtype: dequantised when they are read.

    Args:
        quantised: the scheme of the same maps with codes.
    """

    def __init__(self, quantised: Fp8BlockScheme) -> None:
        self.quantised = quantised

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """A matrix for each part, with its scales beside it."""
        found = super().weights(linear, source, expert)
        return [
            weight if self.quantised.is_plain(part.name) else self._scaled(weight)
            for part, weight in zip(linear.parts, found, strict=True)
        ]

    def _scaled(self, plain: Weight) -> Weight:
        rows, columns = (
            -(-n // size) for n, size in zip(plain.shape, self.quantised.block, strict=True)
        )
        name = plain.source.removesuffix("weight") + self.quantised.scale_name
        scales = Weight(name, (rows, columns), None, dtypes=SCALE_DTYPES)

        def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
            decoded = decode_scale(scale, name)
            for axis, size in enumerate(self.quantised.block):
                decoded = decoded.repeat_interleave(size, dim=axis)
            matrix = stored.float() * decoded[: stored.shape[0], : stored.shape[1]]
            return matrix if plain.transform is None else plain.transform(matrix)

        return replace(
            plain, transform=dequantise, dtypes=("F8_E4M3",), beside=(scales,), whole=True
        )


def decode_scale(stored: Tensor, name: str) -> Tensor:
    """Scales of a checkpoint as float32.

    Raises:
        BadModel: a scale is NaN, infinite or negative.
    """
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        stored = e8m0.decode(stored)
    scale = stored.float()
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise BadModel(
            f"{name} holds a scale that is NaN, infinite or negative", "Copy the file again"
        )
    return scale
