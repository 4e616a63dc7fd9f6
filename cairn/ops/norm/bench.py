"""What `cairn bench ops` times of this family."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Alternative, Draw, Point, Points, flashinfer, moved
from cairn.ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from cairn.ops.norm.fused_inplace_qknorm import fused_inplace_qknorm
from cairn.ops.norm.fused_inplace_qknorm_across_heads import fused_inplace_qknorm_across_heads
from cairn.ops.norm.fused_rmsnorm_gated import fused_rmsnorm_gated
from cairn.ops.norm.gemma_fused_add_rmsnorm import gemma_fused_add_rmsnorm
from cairn.ops.norm.gemma_rmsnorm import gemma_rmsnorm
from cairn.ops.norm.l2norm import l2norm
from cairn.ops.norm.layernorm import layernorm
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.norm.rmsnorm_add import rmsnorm_add
from cairn.ops.norm.rmsnorm_hf import rmsnorm_hf


@fused_add_rmsnorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, residual = (draw.randn(rows, width) for _ in range(2))
        weight = draw.randn(width)
        others = (
            *draw.by_torch(fused_add_rmsnorm.reference),
            *flashinfer("norm.fused_add_rmsnorm"),
        )
        least = moved(x, x, residual, residual, weight)
        yield Point(size, draw.args(x, residual, weight), least, alternatives=others)


@fused_inplace_qknorm.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
        q, k = draw.randn(rows, heads, dim), draw.randn(rows, kv_heads, dim)
        yield Point(
            f"{layer.name}: {rows} x {heads} + {kv_heads} x {dim}",
            draw.args(q, k, draw.randn(dim), draw.randn(dim)),
            moved(q, q, k, k),
            alternatives=draw.by_torch(fused_inplace_qknorm.reference),
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
            alternatives=draw.by_torch(fused_inplace_qknorm_across_heads.reference),
        )


@gemma_fused_add_rmsnorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, residual = (draw.randn(rows, width) for _ in range(2))
        weight = draw.randn(width)
        others = (
            *draw.by_torch(gemma_fused_add_rmsnorm.reference),
            *flashinfer("norm.gemma_fused_add_rmsnorm"),
        )
        least = moved(x, x, residual, residual, weight)
        yield Point(size, draw.args(x, residual, weight), least, alternatives=others)


@gemma_rmsnorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight = draw.randn(rows, width), draw.randn(width)
        others = (
            *draw.by_torch(gemma_rmsnorm.reference),
            *flashinfer("norm.gemma_rmsnorm"),
        )
        yield Point(size, draw.args(x, weight), moved(x, x, weight), alternatives=others)


@rmsnorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight = draw.randn(rows, width), draw.randn(width)
        others = (
            Alternative("rms_norm", lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)),
            *draw.by_torch(rmsnorm.reference),
            *flashinfer("norm.rmsnorm"),
        )
        yield Point(size, draw.args(x, weight), moved(x, x, weight), alternatives=others)


@rmsnorm_add.bench
def _(draw: Draw) -> Points:
    def apart(input: Tensor, residual: Tensor, weight: Tensor) -> None:
        residual.add_(rmsnorm(input, weight))

    for size, rows, width in draw.matrices():
        x, residual = (draw.randn(rows, width) for _ in range(2))
        given = draw.args(x, residual, draw.randn(width))
        others = (Alternative("rmsnorm, add", apart), *draw.by_torch(rmsnorm_add.reference))
        yield Point(size, given, moved(x, residual, residual), alternatives=others)


@rmsnorm_hf.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight = draw.randn(rows, width), draw.randn(width)
        others = (*draw.by_torch(rmsnorm_hf.reference),)
        yield Point(size, draw.args(x, weight), moved(x, x, weight), alternatives=others)


@fused_rmsnorm_gated.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight, gate = draw.randn(rows, width), draw.randn(width), draw.randn(rows, width)
        others = draw.by_torch(fused_rmsnorm_gated.reference)
        yield Point(size, draw.args(x, weight, gate), moved(x, x, gate), alternatives=others)


@l2norm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x = draw.randn(rows, width)
        others = draw.by_torch(l2norm.reference)
        yield Point(size, draw.args(x), moved(x, x), alternatives=others)


@layernorm.bench
def _(draw: Draw) -> Points:
    for size, rows, width in draw.matrices():
        x, weight, bias = draw.randn(rows, width), draw.randn(width), draw.randn(width)
        others = draw.by_torch(layernorm.reference)
        yield Point(
            size, draw.args(x, weight, bias), moved(x, x, weight, bias), alternatives=others
        )
