"""Rotary position embedding (Su et al. 2021, equation 34), applied in place."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.registry import op
from cairn.ops.rotary.kernels import rotate_kernel
from cairn.ops.testing import Cases, Make


@op(mutates=("query", "key"))
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate the first rd numbers of every head of query and key, in place.

    Products and sums are in float32 whatever the dtypes; the result is rounded once.

    Args:
        positions: [T] or [B, S] integers, rows of cos_sin_cache.
        query: [..., n * head_size] or [..., n, head_size], leading shape as positions; rows may be
            strided.
        key: as query, with its own n; or None.
        cos_sin_cache: [max, rd] = [cos | sin], rd / 2 of each; query's dtype or float32.
        is_neox: number i is paired with i + rd / 2; otherwise 2i with 2i + 1.
    """
    cos_sin = cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = cos_sin.chunk(2, dim=-1)
    _rotate(query, cos, sin, head_size, is_neox)
    if key is not None:
        _rotate(key, cos, sin, head_size, is_neox)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, is_neox: bool) -> None:
    """x [..., n, head_size] or [..., n * head_size]; cos, sin [T, rd / 2] float32."""
    tokens, half = cos.shape
    flat = x.shape[:-1].numel() == tokens
    heads = torch.unflatten(x, -1, (x.shape[-1] // head_size, head_size)) if flat else x
    shape = (*heads.shape[:-2], 1, half)
    cos, sin = cos.view(shape), sin.view(shape)
    if is_neox:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    else:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    a, b = first.float(), second.float()
    rotated = a * cos - b * sin
    second.copy_(b * cos + a * sin)
    first.copy_(rotated)


def _heads(x: Tensor, tokens: int, head_size: int) -> Tensor | None:
    """x as [T, n, head_size] without a copy, or None where its strides do not allow it."""
    flat = x.shape[:-1].numel() == tokens
    heads = torch.unflatten(x, -1, (x.shape[-1] // head_size, head_size)) if flat else x
    if heads.stride(-1) != 1:
        return None
    try:
        return heads.view(tokens, *heads.shape[-2:])
    except RuntimeError:
        return None


def _plain(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> bool:
    """Heads that can be addressed by a stride of tokens and one of heads."""
    return (
        positions.is_contiguous()
        and cos_sin_cache.stride(-1) == 1
        and all(
            x is None or _heads(x, positions.numel(), head_size) is not None for x in (query, key)
        )
    )


@rotary_embedding.implementation("triton", devices=gpu.DEVICES, when=_plain)
def _(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    tokens, half = positions.numel(), cos_sin_cache.shape[-1] // 2
    for x in (query, key):
        heads = None if x is None or not tokens else _heads(x, tokens, head_size)
        if heads is None:
            continue
        count = heads.shape[1]
        at_once = min(16, gpu.next_power_of_2(count))
        rotate_kernel[(tokens, -(-count // at_once))](
            *(heads, positions, cos_sin_cache, heads.stride(0), heads.stride(1)),
            *(cos_sin_cache.stride(0), count, half, gpu.next_power_of_2(half), at_once, is_neox),
            num_warps=4,
        )


@rotary_embedding.cases
def _(make: Make) -> Cases:
    half = torch.bfloat16
    cache = make.randn(50, 16)
    positions = make.randint(0, 50, 7)
    yield make.args(positions, make.randn(7, 4, 16), make.randn(7, 2, 16), 16, cache)
    yield make.args(positions, make.randn(7, 64), None, 16, cache, is_neox=False)
    query, key = make.randn(7, 3, 24, dtype=half), make.randn(7, 1, 24, dtype=half)
    yield make.args(positions, query, key, 24, cache)
    query, key = make.randn(7, 48, dtype=half), make.randn(7, 24, dtype=half)
    yield make.args(positions, query, key, 24, cache.to(half), False)
    fused = make.randn(7, 96)
    yield make.args(positions, fused[:, :64], fused[:, 64:], 16, cache)
    batch = make.randint(0, 50, 2, 3)
    yield make.args(batch, make.randn(2, 3, 32), make.randn(2, 3, 2, 16), 16, cache)
    yield make.args(make.arange(0), make.randn(0, 2, 16), None, 16, cache)


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
            alternatives=draw.compiled(rotary_embedding.reference),
        )
