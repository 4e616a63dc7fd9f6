"""What `cairn bench ops` times of this family."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Alternative, Draw, Point, Points, moved
from cairn.ops.weight_only import layout
from cairn.ops.weight_only.awq import awq_dequantize, awq_gemm
from cairn.ops.weight_only.experts_packed import experts_packed
from cairn.ops.weight_only.gptq import gptq_gemm, gptq_shuffle
from cairn.ops.weight_only.linear_packed import dequantize_packed, linear_packed
from cairn.ops.weight_only.marlin import marlin_gemm, moe_marlin_gemm
from cairn.ops.weight_only.qserve import qserve_w4a8_per_chn_gemm, qserve_w4a8_per_group_gemm
from cairn.ops.weight_only.repack import (
    awq_marlin_moe_repack,
    awq_marlin_repack,
    gptq_marlin_repack,
)
from cairn.ops.weight_only.scalar_type import UINT4B8

SIZES = {"full": (4096, 4096), "tiny": (128, 64)}
"""K and N of a weight."""


def _words(draw: Draw, *shape: int) -> Tensor:
    return draw.randint(-(1 << 31), 1 << 31, *shape, dtype=torch.int32)


def _point(draw: Draw, rows: int, *given: Tensor | int | bool | None) -> Point:
    """Of a product of so many rows; the first of what is given are those."""
    width, numbers = SIZES[draw.sizes]
    tensors = [x for x in given if isinstance(x, Tensor)]
    least = moved(*tensors) + rows * numbers * tensors[0].element_size()
    size = f"{rows} x {width} x {numbers}"
    return Point(size, draw.args(*given), least, 2.0 * rows * width * numbers)


@awq_dequantize.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    groups = width // 128
    weight, scales = _words(draw, width, numbers // 8), draw.randn(groups, numbers)
    zeros = _words(draw, groups, numbers // 8)
    least = moved(weight, scales, zeros) + width * numbers * scales.element_size()
    yield Point(f"{width} x {numbers}", draw.args(weight, scales, zeros), least)


@awq_gemm.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    groups = width // 128
    weight, scales = _words(draw, width, numbers // 8), draw.randn(groups, numbers)
    zeros = _words(draw, groups, numbers // 8)
    yield _point(draw, 16, draw.randn(16, width), weight, scales, zeros)


@gptq_gemm.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    groups = width // 128
    weight, zeros = _words(draw, width // 8, numbers), _words(draw, groups, numbers // 8)
    order = draw.arange(0, torch.int32)
    scales = draw.randn(groups, numbers)
    yield _point(draw, 16, draw.randn(16, width), weight, zeros, scales, order, False, 4)


@gptq_shuffle.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    weight, order = _words(draw, width // 8, numbers), draw.arange(0, torch.int32)
    yield Point(f"{width} x {numbers}", draw.args(weight, order, 4), moved(weight, weight))


@gptq_marlin_repack.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    weight, order = _words(draw, width // 8, numbers), draw.arange(0, torch.int32)
    given = draw.args(weight, order, width, numbers, 4)
    yield Point(f"{width} x {numbers}", given, moved(weight, weight))


@awq_marlin_repack.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    weight = _words(draw, width, numbers // 8)
    given = draw.args(weight, width, numbers, 4)
    yield Point(f"{width} x {numbers}", given, moved(weight, weight))


@awq_marlin_moe_repack.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    weight = _words(draw, 4, width, numbers // 8)
    given = draw.args(weight, None, width, numbers, 4)
    yield Point(f"4 x {width} x {numbers}", given, moved(weight, weight))


@marlin_gemm.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    weight, scales = _words(draw, width // 16, 2 * numbers), draw.randn(width // 128, numbers)
    x = draw.randn(16, width)
    yield _point(draw, 16, x, weight, scales, None, None, None, None, UINT4B8.id)


@moe_marlin_gemm.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    weight, scales = _words(draw, 4, width // 16, 2 * numbers), draw.randn(4, width // 128, numbers)
    x, order = draw.randn(16, width), draw.arange(16, torch.int32)
    experts, used = draw.arange(4, torch.int32), draw.arange(1, torch.int32) + 16
    given = (weight, None, scales, None, None, None, None, order, experts, used, None, 4, 1)
    yield _point(draw, 16, x, *given, UINT4B8.id)


def _int8(draw: Draw, *shape: int) -> Tensor:
    return draw.randint(-128, 128, *shape, dtype=torch.int8)


@qserve_w4a8_per_chn_gemm.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    x, weight = _int8(draw, 16, width), _int8(draw, numbers, width // 2)
    of_numbers, of_rows = draw.rand(numbers).half(), draw.rand(16).half()
    yield _point(draw, 16, x, weight, of_numbers, of_rows, of_numbers, of_rows)


@qserve_w4a8_per_group_gemm.bench
def _(draw: Draw) -> Points:
    width, numbers = SIZES[draw.sizes]
    x, weight = _int8(draw, 16, width), _int8(draw, numbers, width // 2)
    zeros = _int8(draw, width // 128, numbers)
    yield _point(draw, 16, x, weight, zeros, zeros, draw.rand(numbers).half(), draw.rand(16).half())


SHAPES = {
    "full": ((6144, 4096, (4, 8)), (4096, 12288, (4,)), (24576, 4096, (4,))),
    "tiny": ((64, 128, (4, 8)),),
}
"""N and K of products of Qwen3-8B's layers, and the bits that they are timed with."""


@linear_packed.bench
def _(draw: Draw) -> Points:
    for numbers, width, kinds in SHAPES[draw.sizes]:
        plain = draw.randn(numbers, width)
        for bits in kinds:
            words = _words(draw, layout.words_of(width, bits), numbers)
            scale = draw.rand(width // 128, numbers)
            zero = draw.randint(0, 1 << bits, width // 128, numbers, dtype=torch.int16)
            for rows in (1, 16, 64, 4096) if draw.sizes == "full" else (1, 5):
                x = draw.randn(rows, width)
                size = f"{bits} bits: {rows} x {width} x {numbers}"
                least = moved(words, scale, zero, x) + rows * numbers * x.element_size()
                others = Alternative("linear", torch.nn.functional.linear, draw.args(x, plain))
                given = draw.args(x, words, scale, zero, bits)
                yield Point(size, given, least, 2.0 * rows * numbers * width, (others,))


@dequantize_packed.bench
def _(draw: Draw) -> Points:
    for numbers, width, _ in SHAPES[draw.sizes]:
        words = _words(draw, layout.words_of(width, 4), numbers)
        scale = draw.rand(width // 128, numbers)
        least = moved(words, scale) + numbers * width * draw.dtype.itemsize
        given = draw.args(words, scale, None, 4, width, draw.dtype)
        yield Point(f"{numbers} x {width}", given, least)


@experts_packed.bench
def _(draw: Draw) -> Points:
    experts, numbers, width = (128, 1536, 2048) if draw.sizes == "full" else (3, 24, 128)
    words = _words(draw, experts, layout.words_of(width, 4), numbers)
    scale = draw.rand(experts, width // 128, numbers)
    for tokens in (1, 16, 64, 4096) if draw.sizes == "full" else (1, 5):
        topk = 8 if draw.sizes == "full" else 2
        x = draw.randn(tokens, width)
        ids = draw.rand(tokens, experts).argsort(dim=1)[:, :topk].int()
        hit = int(ids.unique().numel())
        least = hit * moved(words[0], scale[0]) + moved(x) + ids.numel() * numbers * 2
        given = draw.args(x, words, scale, None, 4, ids, topk)
        size = f"{tokens} x {width} x {numbers}, {topk} of {experts}"
        yield Point(size, given, least, 2.0 * ids.numel() * numbers * width)
