"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
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
    """A benchmark point of a product with this many rows; the first argument drawn is the rows."""
    width, outputs = SIZES[draw.sizes]
    tensors = [x for x in given if isinstance(x, Tensor)]
    least = moved(*tensors) + rows * outputs * tensors[0].element_size()
    size = f"{rows} x {width} x {outputs}"
    return Point(size, draw.args(*given), least, 2.0 * rows * width * outputs)


@awq_dequantize.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    groups = width // 128
    weight, scales = _words(draw, width, outputs // 8), draw.randn(groups, outputs)
    zeros = _words(draw, groups, outputs // 8)
    least = moved(weight, scales, zeros) + width * outputs * scales.element_size()
    yield Point(f"{width} x {outputs}", draw.args(weight, scales, zeros), least)


@awq_gemm.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    groups = width // 128
    weight, scales = _words(draw, width, outputs // 8), draw.randn(groups, outputs)
    zeros = _words(draw, groups, outputs // 8)
    yield _point(draw, 16, draw.randn(16, width), weight, scales, zeros)


@gptq_gemm.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    groups = width // 128
    weight, zeros = _words(draw, width // 8, outputs), _words(draw, groups, outputs // 8)
    order = draw.arange(0, torch.int32)
    scales = draw.randn(groups, outputs)
    yield _point(draw, 16, draw.randn(16, width), weight, zeros, scales, order, False, 4)


@gptq_shuffle.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    weight, order = _words(draw, width // 8, outputs), draw.arange(0, torch.int32)
    yield Point(f"{width} x {outputs}", draw.args(weight, order, 4), moved(weight, weight))


@gptq_marlin_repack.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    weight, order = _words(draw, width // 8, outputs), draw.arange(0, torch.int32)
    given = draw.args(weight, order, width, outputs, 4)
    yield Point(f"{width} x {outputs}", given, moved(weight, weight))


@awq_marlin_repack.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    weight = _words(draw, width, outputs // 8)
    given = draw.args(weight, width, outputs, 4)
    yield Point(f"{width} x {outputs}", given, moved(weight, weight))


@awq_marlin_moe_repack.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    weight = _words(draw, 4, width, outputs // 8)
    given = draw.args(weight, None, width, outputs, 4)
    yield Point(f"4 x {width} x {outputs}", given, moved(weight, weight))


@marlin_gemm.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    weight, scales = _words(draw, width // 16, 2 * outputs), draw.randn(width // 128, outputs)
    x = draw.randn(16, width)
    yield _point(draw, 16, x, weight, scales, None, None, None, None, UINT4B8.id)


@moe_marlin_gemm.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    weight, scales = _words(draw, 4, width // 16, 2 * outputs), draw.randn(4, width // 128, outputs)
    x, order = draw.randn(16, width), draw.arange(16, torch.int32)
    experts, used = draw.arange(4, torch.int32), draw.arange(1, torch.int32) + 16
    given = (weight, None, scales, None, None, None, None, order, experts, used, None, 4, 1)
    yield _point(draw, 16, x, *given, UINT4B8.id)


def _int8(draw: Draw, *shape: int) -> Tensor:
    return draw.randint(-128, 128, *shape, dtype=torch.int8)


@qserve_w4a8_per_chn_gemm.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    x, weight = _int8(draw, 16, width), _int8(draw, outputs, width // 2)
    of_numbers, of_rows = draw.rand(outputs).half(), draw.rand(16).half()
    yield _point(draw, 16, x, weight, of_numbers, of_rows, of_numbers, of_rows)


@qserve_w4a8_per_group_gemm.bench
def _(draw: Draw) -> Points:
    width, outputs = SIZES[draw.sizes]
    x, weight = _int8(draw, 16, width), _int8(draw, outputs, width // 2)
    zeros = _int8(draw, width // 128, outputs)
    yield _point(draw, 16, x, weight, zeros, zeros, draw.rand(outputs).half(), draw.rand(16).half())


SHAPES = {
    "full": ((6144, 4096, (4, 8)), (4096, 12288, (4,)), (24576, 4096, (4,))),
    "tiny": ((64, 128, (4, 8)),),
}
"""(N, K) of Qwen3-8B's projections, and the bits to time them with."""


@linear_packed.bench
def _(draw: Draw) -> Points:
    for outputs, width, kinds in SHAPES[draw.sizes]:
        plain = draw.randn(outputs, width)
        for bits in kinds:
            words = _words(draw, layout.words_of(width, bits), outputs)
            scale = draw.rand(width // 128, outputs)
            zero = draw.randint(0, 1 << bits, width // 128, outputs, dtype=torch.int16)
            for rows in (1, 16, 64, 4096) if draw.sizes == "full" else (1, 5):
                x = draw.randn(rows, width)
                size = f"{bits} bits: {rows} x {width} x {outputs}"
                least = moved(words, scale, zero, x) + rows * outputs * x.element_size()
                others = Alternative("linear", torch.nn.functional.linear, draw.args(x, plain))
                given = draw.args(x, words, scale, zero, bits)
                yield Point(size, given, least, 2.0 * rows * outputs * width, (others,))


@dequantize_packed.bench
def _(draw: Draw) -> Points:
    for outputs, width, _ in SHAPES[draw.sizes]:
        words = _words(draw, layout.words_of(width, 4), outputs)
        scale = draw.rand(width // 128, outputs)
        least = moved(words, scale) + outputs * width * draw.dtype.itemsize
        given = draw.args(words, scale, None, 4, width, draw.dtype)
        yield Point(f"{outputs} x {width}", given, least)


@experts_packed.bench
def _(draw: Draw) -> Points:
    experts, outputs, width = (128, 1536, 2048) if draw.sizes == "full" else (3, 24, 128)
    words = _words(draw, experts, layout.words_of(width, 4), outputs)
    scale = draw.rand(experts, width // 128, outputs)
    for tokens in (1, 16, 64, 4096) if draw.sizes == "full" else (1, 5):
        topk = 8 if draw.sizes == "full" else 2
        x = draw.randn(tokens, width)
        ids = draw.rand(tokens, experts).argsort(dim=1)[:, :topk].int()
        hit = int(ids.unique().numel())
        least = hit * moved(words[0], scale[0]) + moved(x) + ids.numel() * outputs * 2
        given = draw.args(x, words, scale, None, 4, ids, topk)
        size = f"{tokens} x {width} x {outputs}, {topk} of {experts}"
        yield Point(size, given, least, 2.0 * ids.numel() * outputs * width)
