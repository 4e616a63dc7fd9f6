"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.linear.dsv3_gemms import dsv3_fused_a_gemm, dsv3_router_gemm
from cairn.ops.linear.fp8_blockwise_scaled_mm import fp8_blockwise_scaled_mm
from cairn.ops.linear.gated_linear import gated_linear
from cairn.ops.linear.linear import linear
from cairn.ops.linear.linear_add import linear_add
from cairn.ops.linear.linear_add_rmsnorm import linear_add_rmsnorm
from cairn.ops.linear.linear_fp8_blocks import linear_fp8_blocks
from cairn.ops.linear.scaled_mm import bmm_fp8, fp8_scaled_mm, int8_scaled_mm
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.testing import Arguments


def _by_torch(x: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    normed = torch.nn.functional.rms_norm(x, norm.shape, norm, 1e-6)
    gate, up = torch.nn.functional.linear(normed, weight).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@gated_linear.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        x, norm = draw.randn(rows, layer.hidden), draw.randn(layer.hidden)
        weight = draw.randn(2 * layer.intermediate, layer.hidden, scale=layer.hidden**-0.5)
        yield Point(
            f"{layer.name}: {rows} x {layer.hidden} x 2 x {layer.intermediate}",
            draw.args(x, weight, norm),
            moved(x, weight, norm) + rows * layer.intermediate * x.element_size(),
            2.0 * rows * weight.numel(),
            draw.by_torch(_by_torch, "rms_norm, linear, silu"),
        )


def _linear_by_torch(x: Tensor, weight: Tensor, _: None, norm: Tensor) -> Tensor:
    return torch.nn.functional.linear(
        torch.nn.functional.rms_norm(x, norm.shape, norm, 1e-6), weight
    )


@linear.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        shapes = [("qkv", rows, 2 * (layer.heads + layer.kv_heads) * layer.head_dim)]
        if rows == 1:
            shapes += [("head", count, layer.vocabulary) for count in (1, 8, 64)]
        for name, rows, outputs in shapes:
            x, norm = draw.randn(rows, layer.hidden), draw.randn(layer.hidden)
            weight = draw.randn(outputs, layer.hidden, scale=layer.hidden**-0.5)
            yield Point(
                f"{layer.name} {name}: {rows} x {layer.hidden} x {outputs}",
                draw.args(x, weight, None, norm),
                moved(x, weight, norm) + rows * outputs * x.element_size(),
                2.0 * rows * weight.numel(),
                draw.by_torch(_linear_by_torch, "rms_norm, linear"),
            )


def _add_by_torch(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    residual.addmm_(x, weight.t())


@linear_add.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        for name, width in (("out", layer.heads * layer.head_dim), ("down", layer.intermediate)):
            x, residual = draw.randn(rows, width), draw.randn(rows, layer.hidden)
            weight = draw.randn(layer.hidden, width, scale=width**-0.5)
            yield Point(
                f"{layer.name} {name}: {rows} x {width} x {layer.hidden}",
                draw.args(x, residual, weight),
                moved(x, weight, residual, residual),
                2.0 * rows * weight.numel(),
                draw.by_torch(_add_by_torch, "addmm_"),
            )


def _add_rmsnorm_by_torch(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    residual.addmm_(x, weight.t())
    return torch.nn.functional.rms_norm(residual, norm.shape, norm, 1e-6)


@linear_add_rmsnorm.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.products():
        for name, width in (("out", layer.heads * layer.head_dim), ("down", layer.intermediate)):
            x, residual = draw.randn(rows, width), draw.randn(rows, layer.hidden)
            weight = draw.randn(layer.hidden, width, scale=width**-0.5)
            norm = draw.randn(layer.hidden)
            yield Point(
                f"{layer.name} {name}: {rows} x {width} x {layer.hidden}",
                draw.args(x, residual, weight, norm),
                moved(x, weight, residual, residual, residual, norm),
                2.0 * rows * weight.numel(),
                draw.by_torch(_add_rmsnorm_by_torch, "addmm_, rms_norm"),
            )


BLOCK_SHAPES = {
    "full": (("q_b", 24576, 1536), ("out", 7168, 16384), ("down", 2048, 1408)),
    "tiny": (("q_b", 48, 128),),
}
"""(name, N, K) of DeepSeek-V3's projections, and of a model that fits on one GPU."""


def _in_blocks(draw: Draw) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(size in words, tokens, codes of a weight, scales)."""
    for name, outputs, width in BLOCK_SHAPES[draw.sizes]:
        weight = draw.randn(outputs, width, dtype=torch.float32).to(E4M3)
        scale = draw.rand(blocks.count(outputs), blocks.count(width))
        for rows in (1, 64, 8192) if draw.sizes == "full" else (1, 5):
            x = draw.randn(rows, width)
            yield f"{name}: {rows} x {width} x {outputs}", x, weight, scale


@linear_fp8_blocks.bench
def _(draw: Draw) -> Points:
    for size, x, weight, scale in _in_blocks(draw):
        flops = 2.0 * x.shape[0] * weight.numel()
        least = moved(x, weight, scale) + x.shape[0] * len(weight) * x.element_size()
        yield Point(size, draw.args(x, weight, scale), least, flops)


@fp8_blockwise_scaled_mm.bench
def _(draw: Draw) -> Points:
    for size, x, weight, scale in _in_blocks(draw):
        codes, own = blocks.quantized(x)
        flops = 2.0 * x.shape[0] * weight.numel()
        least = moved(codes, weight, scale, own) + x.shape[0] * len(weight) * x.element_size()
        yield Point(size, draw.args(codes, weight.t(), own, scale.t(), x.dtype), least, flops)


@dsv3_fused_a_gemm.bench
def _(draw: Draw) -> Points:
    width, outputs = (7168, 2112) if draw.sizes == "full" else (64, 24)
    for rows in (1, 16):
        x, weight = draw.randn(rows, width), draw.randn(outputs, width)
        least = moved(x, weight) + rows * outputs * x.element_size()
        size = f"{rows} x {width} x {outputs}"
        yield Point(size, draw.args(x, weight.t()), least, 2.0 * rows * weight.numel())


@dsv3_router_gemm.bench
def _(draw: Draw) -> Points:
    width, experts = (7168, 256) if draw.sizes == "full" else (64, 8)
    for rows in (1, 16):
        x, weight = draw.randn(rows, width), draw.randn(experts, width)
        least, size = moved(x, weight) + rows * experts * 4, f"{rows} x {width} x {experts}"
        given = draw.args(x, weight, torch.float32)
        yield Point(size, given, least, 2.0 * rows * weight.numel())


SCALED_SHAPES = {"full": ((6144, 4096), (4096, 12288), (24576, 4096)), "tiny": ((48, 64),)}
"""(N, K) of Qwen3-8B's projections."""


def _scaled(draw: Draw, dtype: torch.dtype) -> Points:
    for outputs, width in SCALED_SHAPES[draw.sizes]:
        weight = (draw.randn(outputs, width, dtype=torch.float32) * 40).to(dtype)
        scale = draw.rand(outputs)
        for rows in (1, 8, 64, 4096) if draw.sizes == "full" else (1, 5):
            x = (draw.randn(rows, width, dtype=torch.float32) * 40).to(dtype)
            given = draw.args(x, weight.t(), draw.rand(rows), scale, draw.dtype)
            least = moved(x, weight, scale) + rows * outputs * draw.dtype.itemsize
            size = f"{rows} x {width} x {outputs}"
            others = _by_cublas(draw, given) if rows > MIN_ROWS else ()
            yield Point(size, given, least, 2.0 * rows * weight.numel(), others)


MIN_ROWS = 16
"""torch's products of 8-bit codes need more rows than this."""


def _by_cublas(draw: Draw, given: Arguments) -> tuple[Alternative, ...]:
    """torch's product of codes: of int8 without the scales."""
    x, weight, own, scale, dtype = given.args
    if x.dtype == torch.int8:
        return (Alternative("torch._int_mm", torch._int_mm, draw.args(x, weight)),)
    scales = (own.view(-1, 1), scale.view(1, -1))
    args = draw.args(x, weight, *scales, out_dtype=dtype)
    return (Alternative("torch._scaled_mm", torch._scaled_mm, args),)


@fp8_scaled_mm.bench
def _(draw: Draw) -> Points:
    yield from _scaled(draw, E4M3)


@int8_scaled_mm.bench
def _(draw: Draw) -> Points:
    yield from _scaled(draw, torch.int8)


@bmm_fp8.bench
def _(draw: Draw) -> Points:
    batch, rows, width, outputs = (16, 64, 512, 128) if draw.sizes == "full" else (2, 3, 16, 16)
    a, b = (draw.randn(batch, n, width).to(E4M3) for n in (rows, outputs))
    scale = draw.rand(1)
    given = draw.args(a, b.transpose(1, 2), scale, scale, draw.dtype)
    least = moved(a, b) + batch * rows * outputs * draw.dtype.itemsize
    size = f"{batch} x {rows} x {width} x {outputs}"
    yield Point(size, given, least, 2.0 * batch * rows * width * outputs)
