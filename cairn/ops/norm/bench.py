"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, flashinfer, moved
from cairn.ops.norm.fused_add_layernorm import fused_add_layernorm
from cairn.ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from cairn.ops.norm.fused_inplace_qknorm import fused_inplace_qknorm
from cairn.ops.norm.fused_inplace_qknorm_across_heads import fused_inplace_qknorm_across_heads
from cairn.ops.norm.fused_rmsnorm_gated import fused_rmsnorm_gated
from cairn.ops.norm.gemma import gemma4_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm
from cairn.ops.norm.l2norm import l2norm
from cairn.ops.norm.layernorm import layernorm
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.norm.rmsnorm_add import rmsnorm_add
from cairn.ops.norm.rmsnorm_hf import rmsnorm_hf
from cairn.ops.registry import BenchSource


def _rows(name: str, *others: Alternative) -> BenchSource:
    """Benchmark points of a norm, with FlashInfer's function of the same name as an alternative."""

    def points(draw: Draw) -> Points:
        for size, rows, width in draw.matrices():
            x, weight = draw.randn(rows, width), draw.randn(width)
            every = (*others, *flashinfer(f"norm.{name}"))
            least = moved(x, x, weight)
            yield Point(size, draw.args(x, weight), least, alternatives=every, definition=True)

    return points


def _sums(name: str) -> BenchSource:
    """The same of a norm of a sum."""

    def points(draw: Draw) -> Points:
        for size, rows, width in draw.matrices():
            x, residual = (draw.randn(rows, width) for _ in range(2))
            weight = draw.randn(width)
            given, least = draw.args(x, residual, weight), moved(x, x, residual, residual, weight)
            others = flashinfer(f"norm.{name}")
            yield Point(size, given, least, alternatives=others, definition=True)

    return points


def _by_torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


rmsnorm.bench(_rows("rmsnorm", Alternative("rms_norm", _by_torch)))
gemma4_rmsnorm.bench(_rows("gemma4_rmsnorm"))
gemma_rmsnorm.bench(_rows("gemma_rmsnorm"))
rmsnorm_hf.bench(_rows("rmsnorm_hf"))
fused_add_rmsnorm.bench(_sums("fused_add_rmsnorm"))
gemma_fused_add_rmsnorm.bench(_sums("gemma_fused_add_rmsnorm"))


@fused_inplace_qknorm.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
        q, k = draw.randn(rows, heads, dim), draw.randn(rows, kv_heads, dim)
        yield Point(
            f"{layer.name}: {rows} x {heads} + {kv_heads} x {dim}",
            draw.args(q, k, draw.randn(dim), draw.randn(dim)),
            moved(q, q, k, k),
            definition=True,
        )


@fused_inplace_qknorm_across_heads.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        q_width, k_width = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        q, k = draw.randn(rows, q_width), draw.randn(rows, k_width)
        yield Point(
            f"{layer.name}: {rows} x {q_width} + {k_width}",
            draw.args(q, k, draw.randn(q_width), draw.randn(k_width)),
            moved(q, q, k, k),
            definition=True,
        )


@rmsnorm_add.bench
def _(draw: Draw) -> Points:
    def apart(input: Tensor, residual: Tensor, weight: Tensor) -> None:
        residual.add_(rmsnorm(input, weight))

    for size, rows, width in draw.matrices():
        x, residual = (draw.randn(rows, width) for _ in range(2))
        given = draw.args(x, residual, draw.randn(width))
        others = (Alternative("rmsnorm, add", apart),)
        yield Point(size, given, moved(x, residual, residual), alternatives=others, definition=True)


@fused_rmsnorm_gated.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight, gate = draw.randn(rows, width), draw.randn(width), draw.randn(rows, width)
        yield Point(size, draw.args(x, weight, gate), moved(x, x, gate), definition=True)


@l2norm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x = draw.randn(rows, width)
        yield Point(size, draw.args(x), moved(x, x), definition=True)


@layernorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight, bias = draw.randn(rows, width), draw.randn(width), draw.randn(width)
        yield Point(size, draw.args(x, weight, bias), moved(x, x, weight, bias), definition=True)


@fused_add_layernorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, residual = (draw.randn(rows, width) for _ in range(2))
        weight, bias = draw.randn(width), draw.randn(width)
        least = moved(x, x, residual, residual, weight, bias)
        yield Point(size, draw.args(x, residual, weight, bias), least, definition=True)
