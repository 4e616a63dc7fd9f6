"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.quantization.codes import E4M3
from cairn.ops.testing import Cases, Make
from cairn.ops.weight_only import layout
from cairn.ops.weight_only.awq import awq_dequantize, awq_gemm
from cairn.ops.weight_only.experts_packed import experts_packed
from cairn.ops.weight_only.gptq import BITS, gptq_gemm, gptq_shuffle
from cairn.ops.weight_only.linear_packed import dequantize_packed, linear_packed
from cairn.ops.weight_only.marlin import marlin_gemm, moe_marlin_gemm
from cairn.ops.weight_only.qserve import qserve_w4a8_per_chn_gemm, qserve_w4a8_per_group_gemm
from cairn.ops.weight_only.repack import (
    awq_marlin_moe_repack,
    awq_marlin_repack,
    gptq_marlin_repack,
)
from cairn.ops.weight_only.scalar_type import (
    FLOAT4_E2M1,
    FLOAT8_E4M3,
    UINT4,
    UINT4B8,
    UINT8B128,
)

DTYPES = (torch.float32, torch.bfloat16)


def _words(make: Make, *shape: int) -> Tensor:
    return make.randint(-(1 << 31), 1 << 31, *shape, dtype=torch.int32)


def _scales(make: Make, *shape: int, dtype: torch.dtype) -> Tensor:
    return (0.01 + 0.02 * make.rand(*shape)).to(dtype)


def _order(make: Make, *shape: int) -> Tensor:
    return torch.argsort(make.rand(*shape), dim=-1).int()


@awq_dequantize.cases
def _(make: Make) -> Cases:
    for dtype in DTYPES:
        yield make.args(_words(make, 32, 3), _scales(make, 4, 24, dtype=dtype), _words(make, 4, 3))
    yield make.args(_words(make, 8, 1), _scales(make, 1, 8, dtype=dtype), _words(make, 1, 1))


@awq_gemm.cases
def _(make: Make) -> Cases:
    for dtype in DTYPES:
        weight = _words(make, 32, 3), _scales(make, 4, 24, dtype=dtype), _words(make, 4, 3)
        yield make.args(make.randn(5, 32, dtype=dtype), *weight)
    yield make.args(make.randn(0, 32, dtype=dtype), *weight, 8)


@gptq_gemm.cases
def _(make: Make) -> Cases:
    for bits in BITS:
        for dtype in DTYPES:
            weight, zeros = _words(make, 2 * bits, 32), _words(make, 4, bits)
            scales, x = _scales(make, 4, 32, dtype=dtype), make.randn(3, 64, dtype=dtype)
            groups = make.randint(0, 4, 64, dtype=torch.int32)
            yield make.args(x, weight, zeros, scales, groups, False, bits)
            yield make.args(x, weight, zeros, scales, _order(make, 64), True, bits)
    yield make.args(x[:0], weight, zeros, scales, groups[:0], True, bits)


@gptq_shuffle.cases
def _(make: Make) -> Cases:
    for bits in BITS:
        yield make.args(_words(make, 2 * bits, 5), _order(make, 64), bits)
        yield make.args(_words(make, bits, 3), make.arange(0, torch.int32), bits)


@gptq_marlin_repack.cases
def _(make: Make) -> Cases:
    for bits in (4, 8):
        yield make.args(_words(make, bits, 128), _order(make, 32), 32, 128, bits)
    yield make.args(_words(make, 4, 64), make.arange(0, torch.int32), 16, 64, 8)


@awq_marlin_repack.cases
def _(make: Make) -> Cases:
    yield make.args(_words(make, 32, 16), 32, 128, 4)
    yield make.args(_words(make, 16, 16), 16, 64, 8)


@awq_marlin_moe_repack.cases
def _(make: Make) -> Cases:
    yield make.args(_words(make, 2, 32, 8), _order(make, 2, 32), 32, 64, 4)
    yield make.args(_words(make, 3, 16, 16), None, 16, 64, 8)


def _marlin(make: Make, kind: int, bits: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Weight and scales of [64, 64]."""
    words = _words(make, 4, 32 * bits)
    if kind == FLOAT8_E4M3.id:
        words &= 0x3F3F3F3F  # no NaN
    return [words, _scales(make, groups, 64, dtype=dtype)]


@marlin_gemm.cases
def _(make: Make) -> Cases:
    for dtype in DTYPES:
        for kind, groups in ((UINT4B8, 1), (UINT8B128, 4), (FLOAT8_E4M3, 1)):
            weight = _marlin(make, kind.id, kind.bits, groups, dtype)
            x = make.randn(3, 64, dtype=dtype)
            yield make.args(x, *weight, None, None, None, None, kind.id)
        weight = _marlin(make, UINT4.id, 4, 4, dtype)
        yield make.args(x, *weight, None, _words(make, 4, 8), None, None, UINT4.id)
        float_zeros = make.randn(4, 64, dtype=dtype)
        yield make.args(x, *weight, None, float_zeros, None, None, UINT4.id, True)
        by_row = make.randint(0, 4, 64, dtype=torch.int32).sort().values
        yield make.args(x, *weight, None, None, by_row, _order(make, 64), UINT4B8.id)
    scales, factor = make.randn(4, 64).to(E4M3), make.tensor([0.5])
    for rows in (x, x[:0]):
        yield make.args(rows, weight[0], scales, factor, None, None, None, FLOAT4_E2M1.id)


@moe_marlin_gemm.cases
def _(make: Make) -> Cases:
    order = make.tensor([4, 1, 6, 6, 0, 2, 5, 6, 3, 6, 6, 6], torch.int32)
    experts, used = make.tensor([1, 0, -1], torch.int32), make.tensor([12], torch.int32)
    for dtype in DTYPES:
        words, scales = _words(make, 2, 4, 128), _scales(make, 2, 4, 64, dtype=dtype)
        bias, share = make.randn(2, 64, dtype=dtype), make.rand(3, 2)
        x = make.randn(3, 64, dtype=dtype)
        how, none = (order, experts, used), (None, None, None, None)
        yield make.args(x, words, bias, scales, *none, *how, share, 4, 2, UINT4B8.id)
        groups = make.randint(0, 4, 2, 64, dtype=torch.int32).sort().values
        sorted_rows = (make.rand(2), None, groups, _order(make, 2, 64))
        yield make.args(x, words, None, scales, *sorted_rows, *how, None, 4, 2, UINT4B8.id)
        zeros = (None, _words(make, 2, 4, 8), None, None)
        rows = make.randn(6, 64, dtype=dtype)
        yield make.args(rows, words, None, scales, *zeros, *how, None, 4, 1, UINT4.id)


@qserve_w4a8_per_chn_gemm.cases
def _(make: Make) -> Cases:
    half = torch.float16
    x, kernel = (make.randint(-128, 128, *s, dtype=torch.int8) for s in ((5, 64), (96, 32)))
    rows = (make.rand(5, dtype=half), make.rand(96, dtype=half) / 8, make.randn(5, dtype=half))
    scales = (make.rand(96, dtype=half) / 4096, rows[0], rows[1], rows[2])
    yield make.args(x, kernel, *scales)
    yield make.args(x, kernel, *scales, out=make.empty(5, 96, dtype=half))
    yield make.args(x[:0], kernel, scales[0], rows[0][:0], rows[1], rows[2][:0])


@qserve_w4a8_per_group_gemm.cases
def _(make: Make) -> Cases:
    half = torch.float16
    x, kernel = (make.randint(-128, 128, *s, dtype=torch.int8) for s in ((5, 256), (64, 128)))
    zeros, scales = (make.randint(-99, 99, 2, 64, dtype=torch.int8) for _ in range(2))
    given = (make.rand(64, dtype=half) / 4096, make.rand(5, dtype=half))
    yield make.args(x, kernel, zeros, scales, *given)
    yield make.args(x, kernel, zeros, scales, *given, out=make.empty(5, 64, dtype=half))
    yield make.args(x[:0], kernel, zeros, scales, given[0], given[1][:0])


PACKED = (
    (4, 64, 40, 4),
    (8, 96, 24, 1),
    (4, 256, 72, 2),
    (8, 256, 48, 2),
    (4, 320, 130, 1),
    (4, 1024, 24, 8),
)
"""(bits, K, N, groups); the largest K is split over several programs."""


def _packed(make: Make, bits: int, width: int, outputs: int, groups: int) -> list[Tensor]:
    """Words, scales and zero points."""
    codes = make.randint(0, 1 << bits, outputs, width, dtype=torch.int32)
    scale = (0.5 + make.rand(groups, outputs)) / (1 << bits) / width**0.5
    zero = make.randint(0, 1 << bits, groups, outputs, dtype=torch.int16)
    return [layout.to_words(codes, bits), scale, zero]


@linear_packed.cases
def _(make: Make) -> Cases:
    for bits, width, outputs, groups in PACKED:
        words, scale, zero = _packed(make, bits, width, outputs, groups)
        for dtype, rows in ((torch.float32, 3), (torch.bfloat16, 17), (torch.bfloat16, 70)):
            yield make.args(make.randn(rows, width, dtype=dtype), words, scale, zero, bits)
        yield make.args(make.randn(1, width, dtype=dtype), words, scale, None, bits)
    yield make.args(make.randn(0, width), words, scale, zero, bits)


@dequantize_packed.cases
def _(make: Make) -> Cases:
    for bits, width, outputs, groups in PACKED:
        words, scale, zero = _packed(make, bits, width, outputs, groups)
        yield make.args(words, scale, zero, bits, width)
        yield make.args(words, scale, None, bits, width, torch.bfloat16)
        if bits == 8:
            finite = words & 0x3F3F3F3F
            yield make.args(finite, scale, None, bits, width, torch.float32, True)
    both = [torch.stack((x, x.flip(0))) for x in (words, scale, zero)]
    yield make.args(*both, bits, width)


@experts_packed.cases
def _(make: Make) -> Cases:
    for bits, width, outputs, groups in PACKED:
        parts = [_packed(make, bits, width, outputs, groups) for _ in range(3)]
        words, scale, zero = (torch.stack(x) for x in zip(*parts, strict=True))
        for dtype, tokens, topk in ((torch.float32, 3, 2), (torch.bfloat16, 40, 2)):
            ids = make.randint(-1, 3, tokens, topk, dtype=torch.int32)
            x = make.randn(tokens, width, dtype=dtype)
            yield make.args(x, words, scale, zero, bits, ids, topk)
            many = make.randn(tokens * topk, width, dtype=dtype)
            own = words & 0x3F3F3F3F if bits == 8 else words
            yield make.args(many, own, scale, None, bits, ids.long(), 1, bits == 8)
    yield make.args(x[:0], words, scale, zero, bits, ids[:0], topk)
