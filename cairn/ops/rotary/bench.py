"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.rotary import launch
from cairn.ops.rotary.apply_rope_with_cos_sin_cache_inplace import rotary_set_kv
from cairn.ops.rotary.fused_qk_norm_rope import fused_qk_norm_rope
from cairn.ops.rotary.head_norm_rope import head_norm_rope
from cairn.ops.rotary.head_squares import head_squares
from cairn.ops.rotary.heads_into_cache import heads_into_cache
from cairn.ops.rotary.rotary_cos_sin import rotary_cos_sin
from cairn.ops.rotary.rotary_embedding import rotary_embedding
from cairn.ops.rotary.split_norm_rope import split_norm_rope


def _apart(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    value: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    cache_loc: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    is_neox: bool = True,
) -> None:
    """Unfused baseline: the rotation, then two copies by torch."""
    rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    k_buffer[cache_loc], v_buffer[cache_loc] = key, value


@rotary_set_kv.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
        positions, angles = draw.randint(0, 8192, rows), draw.rand(8192, dim)
        q, k = draw.randn(rows, heads * dim), draw.randn(rows, kv_heads * dim)
        value = draw.randn(rows, kv_heads * dim)
        buffers = [draw.randn(rows + 64, kv_heads * dim) for _ in range(2)]
        spot = draw.rand(rows + 64).argsort()[:rows]
        yield Point(
            f"{layer.name}: {rows} x {heads} + {kv_heads} x {dim}",
            draw.args(positions, q, k, dim, angles, value, *buffers, spot),
            moved(q, q, k, k, k, value, value, positions, spot) + 4 * rows * dim,
            alternatives=(Alternative("apart", _apart), *draw.by_torch(rotary_set_kv.reference)),
        )


def _qk_apart(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    base: float,
    is_neox: bool,
    position_ids: Tensor,
    factor: float,
    low: float,
    high: float,
    attention_factor: float,
    rotary_dim: int | None = None,
) -> None:
    """Unfused baseline: two norms, then a rotation by angles from a table."""
    q = qkv[:, : num_heads_q * head_dim].unflatten(-1, (-1, head_dim))
    k = qkv[:, num_heads_q * head_dim :].unflatten(-1, (-1, head_dim))[:, :num_heads_k]
    rmsnorm(q, q_weight, eps, out=q)
    rmsnorm(k, k_weight, eps, out=k)
    inverse = float(base) ** (torch.arange(0, head_dim, 2, device=qkv.device) / -head_dim)
    angle = position_ids[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    launch.rotate(q, cos, sin, head_dim, is_neox)
    launch.rotate(k, cos, sin, head_dim, is_neox)


@fused_qk_norm_rope.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
        qkv = draw.randn(rows, (heads + 2 * kv_heads) * dim)
        weights = draw.randn(dim), draw.randn(dim)
        spot = draw.randint(0, 8192, rows)
        given = (heads, kv_heads, kv_heads, dim, 1e-6, *weights, 1e4, True, spot)
        normed = qkv[:, : (heads + kv_heads) * dim]
        yield Point(
            f"{layer.name}: {rows} x {heads} + {kv_heads} x {dim}",
            draw.args(qkv, *given, 1.0, 1.0, 32.0, 1.0),
            moved(normed, normed, spot),
            alternatives=(
                Alternative("apart", _qk_apart),
                *draw.by_torch(fused_qk_norm_rope.reference),
            ),
        )


@head_norm_rope.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        heads, dim = layer.heads + layer.kv_heads, layer.head_dim
        x, weight = draw.randn(rows, heads, dim), draw.randn(heads, dim)
        angles = draw.randn(rows, dim, dtype=torch.float32)
        yield Point(
            f"{layer.name}: {rows} x {heads} x {dim}",
            draw.args(x, weight, angles),
            moved(x, x, weight, angles),
            alternatives=draw.by_torch(head_norm_rope.reference),
        )


@head_squares.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        q, kv, dim = layer.heads, layer.kv_heads, layer.head_dim
        projected = draw.randn(rows, 2 * (q + kv) * dim)
        yield Point(
            f"{layer.name}: {rows} x {2 * q + kv} x {dim}",
            draw.args(projected, None, q, kv, dim, True),
            moved(projected[:, : (2 * q + kv) * dim]) + 12 * rows,
            alternatives=draw.by_torch(head_squares.reference),
        )


@heads_into_cache.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        q, kv, dim = layer.heads, layer.kv_heads, layer.head_dim
        projected, weight = draw.randn(rows, 2 * (q + kv) * dim), draw.randn(2 * q + kv, dim)
        angles = draw.randn(rows, dim, dtype=torch.float32)
        pages = rows // layer.page_size + 64
        caches = [draw.randn(pages, kv, layer.page_size, dim) for _ in range(2)]
        spot = draw.rand(pages * layer.page_size).argsort()[:rows]
        yield Point(
            f"{layer.name}: {rows} x {2 * (q + kv)} x {dim}",
            draw.args(projected, None, weight, angles, *caches, spot, q),
            moved(projected, projected, weight, angles, spot),
            alternatives=draw.by_torch(heads_into_cache.reference),
        )


@rotary_cos_sin.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        positions, inv_freq = draw.randint(0, 1 << 17, rows), draw.rand(layer.head_dim // 2)
        yield Point(
            f"{layer.name}: {rows} x {layer.head_dim}",
            draw.args(positions, inv_freq),
            moved(positions, inv_freq) + 4 * rows * layer.head_dim,
            alternatives=draw.by_torch(rotary_cos_sin.reference),
        )


@rotary_embedding.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        dim = layer.head_dim
        positions, angles = draw.randint(0, 8192, rows), draw.rand(8192, dim)
        q, k = draw.randn(rows, layer.heads * dim), draw.randn(rows, layer.kv_heads * dim)
        yield Point(
            f"{layer.name}: {rows} x {layer.heads} + {layer.kv_heads} x {dim}",
            draw.args(positions, q, k, dim, angles),
            moved(q, q, k, k, positions) + 4 * rows * dim,
            alternatives=draw.by_torch(rotary_embedding.reference),
        )


@split_norm_rope.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        q, kv, dim = layer.heads, layer.kv_heads, layer.head_dim
        heads = 2 * q + kv
        projected, weight = draw.randn(rows, (heads + kv) * dim), draw.randn(heads, dim)
        angles = draw.randn(rows, dim, dtype=torch.float32)
        read = projected[:, : heads * dim]
        yield Point(
            f"{layer.name}: {rows} x {heads} x {dim}",
            draw.args(projected, None, weight, angles, q, kv),
            moved(read, read, weight, angles),
            alternatives=draw.by_torch(split_norm_rope.reference),
        )
