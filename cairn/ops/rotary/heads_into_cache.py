"""From a joint projection to what attention reads: queries, and keys and values in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu, gpu, lanes
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.cache.quantized import is_quantized
from cairn.ops.cache.write_kv import write_kv
from cairn.ops.checks import INT64, check_caches, expect, refuse
from cairn.ops.early import early_option
from cairn.ops.registry import op
from cairn.ops.rotary import loops
from cairn.ops.rotary.kernels import heads_into_cache_kernel
from cairn.ops.rotary.split_norm_rope import (
    check_projection,
    programs_of,
    split_norm_rope,
)
from cairn.ops.testing import Cases, Make

HEADS_AT_ONCE, SPREAD_TOKENS = 16, 256
"""Heads of a program while there are few tokens."""
NUMBERS_AT_ONCE = 4096
"""Numbers of a program when there are more: few programs with much to do."""


@op(mutates=("k_cache", "v_cache"))
def heads_into_cache(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    location: Tensor,
    num_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """split_norm_rope; its k, and v as it is, go where write_kv puts them.

    The heads of v stand behind those of q, k and, where it has a projection of its own, z.

    Args:
        projected: [T, W], rows may be strided.
        added, weight, cos_sin, eps, whole: as in split_norm_rope.
        k_cache, v_cache, location: as in write_kv, changed.
        num_heads: h_q.
    Returns:
        (q [T, h_q, d], z [T, h_q or 0, d]), contiguous.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    kv_heads, dim = k_cache.shape[1], weight.shape[1]
    heads = num_heads, kv_heads
    q, k, z = split_norm_rope.reference(projected, added, weight, cos_sin, *heads, eps, whole)
    v = _values(projected, added, weight, num_heads, kv_heads)
    write_kv.reference(k, v.unflatten(-1, (kv_heads, dim)), k_cache, v_cache, location)
    return q, z


def _values(
    projected: Tensor, added: Tensor | None, weight: Tensor, num_heads: int, kv_heads: int
) -> Tensor:
    """The columns of v: [T, h_kv d]."""
    heads, dim = weight.shape
    first = heads if added is None else num_heads + kv_heads
    return projected[:, first * dim : (first + kv_heads) * dim]


@heads_into_cache.check
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    location: Tensor,
    num_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
) -> None:
    name = "heads_into_cache"
    _, kv_heads, _, dim = check_caches(name, k_cache, v_cache, projected)
    check_projection(name, projected, added, weight, cos_sin, (num_heads, kv_heads), kv_heads)
    if k_cache.dtype != projected.dtype and not is_quantized(k_cache):
        refuse(name, "k_cache", f"is {k_cache.dtype}, `projected` {projected.dtype}")
    if dim != weight.shape[1]:
        refuse(name, "k_cache", f"has shape {list(k_cache.shape)}, heads of {weight.shape[1]}")
    expect(name, "location", location, projected.shape[:1], INT64, projected, -1)


@heads_into_cache.fake
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    location: Tensor,
    num_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    tokens, (heads, dim) = projected.shape[0], weight.shape
    own = heads - num_heads - k_cache.shape[1]
    return projected.new_empty(tokens, num_heads, dim), projected.new_empty(tokens, own, dim)


def _accepts(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    location: Tensor,
    num_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
) -> bool:
    dim = weight.shape[1]
    return (
        projected.stride(-1) == 1
        and projected.dtype == k_cache.dtype == v_cache.dtype
        and weight.is_contiguous()
        and (added is None or added.stride(-1) == 1)
        and (cos_sin is None or cos_sin.is_contiguous())
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride()[2:] == (dim, 1)
        and gpu.within_32_bits(k_cache, dim=1)
    )


@heads_into_cache.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    location: Tensor,
    num_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    tokens, (heads, dim), kv_heads = projected.shape[0], weight.shape, k_cache.shape[1]
    own = heads - num_heads - kv_heads
    q, z = (
        gpu.empty((tokens, n, dim), projected.dtype, projected.device) for n in (num_heads, own)
    )
    most = HEADS_AT_ONCE if tokens <= SPREAD_TOKENS else max(16, NUMBERS_AT_ONCE // dim)
    programs, at_once, warps = programs_of(weight, num_heads, kv_heads, most, whole)
    early = gpu.launches_early(projected.device)
    if tokens:
        heads_into_cache_kernel[(tokens * (programs + 1),)](
            *(projected, projected if added is None else added, weight),
            *(projected if cos_sin is None else cos_sin, q, z, k_cache, v_cache, location),
            *(projected.stride(0), 0 if added is None else added.stride(0)),
            *(*k_cache.stride()[:2], eps, k_cache.shape[2], num_heads, kv_heads, heads),
            *(heads if added is None else num_heads + kv_heads, dim // 2),
            *(gpu.next_power_of_2(dim // 2), programs + 1, at_once, gpu.next_power_of_2(kv_heads)),
            *(whole, added is not None, cos_sin is not None, early),
            num_warps=warps,
            **early_option(early),
        )
    return q, z


def _dense(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    *args: Any,
    **kwargs: Any,
) -> bool:
    return projected.dtype == k_cache.dtype == v_cache.dtype and all(
        x is None or x.is_contiguous()
        for x in (projected, added, weight, cos_sin, k_cache, v_cache)
    )


def _in_lanes(projected: Tensor, dim: int, whole: bool) -> bool:
    """Whether heads of d numbers, each with a norm of its own, are taken sixteen at once."""
    rounded = lanes.PAIRS and projected.dtype == torch.bfloat16
    return rounded and dim % (2 * lanes.LANES) == 0 and not whole


@heads_into_cache.implementation("numba", devices=cpu.DEVICES, when=_dense)
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    location: Tensor,
    num_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    tokens, (heads, dim) = projected.shape[0], weight.shape
    own = heads - num_heads - k_cache.shape[1]
    q, z = (projected.new_empty(tokens, n, dim) for n in (num_heads, own))
    angles = cpu.numbers_or_none(cos_sin, torch.float32, 2)
    cache = [cpu.numbers(x) for x in (k_cache, v_cache, location)]
    results = map(cpu.numbers, (q, z))
    given, norms = cpu.numbers(projected), cpu.numbers(weight)
    if added is None and _in_lanes(projected, dim, whole):
        loops.heads_in_lanes(given, norms, angles, *cache, np.float32(eps), *results)
    else:
        more = cpu.numbers_or_none(added, projected.dtype, 2)
        loops.heads_into_cache(
            *(given, more, norms, angles, *cache, np.float32(eps), whole, *results)
        )
    return q, z


@heads_into_cache.implementation("composed")
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    location: Tensor,
    num_heads: int,
    eps: float = 1e-6,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Two ops, each as it is fastest."""
    kv_heads = k_cache.shape[1]
    heads = num_heads, kv_heads
    q, k, z = split_norm_rope(projected, added, weight, cos_sin, *heads, eps, whole)
    v = _values(projected, added, weight, num_heads, kv_heads).unflatten(-1, (kv_heads, -1))
    write_kv(k, v, k_cache, v_cache, location)
    return q, z


@heads_into_cache.cases
def _(make: Make) -> Cases:
    location = make.tensor([17, 3, -1, 31, 8], torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        caches = [make.randn(4, 2, 8, 16, dtype=dtype) for _ in range(2)]
        wide = make.randn(5, (4 + 2 + 2) * 16 + 7, dtype=dtype)
        up, angles = make.randn(5, 4 * 16, dtype=dtype), make.randn(5, 16)
        low = (wide, up, make.randn(10, 16, dtype=dtype), angles)
        yield make.args(*low, *caches, location, 4)
        plain = (wide, None, make.randn(6, 16, dtype=dtype), None)
        yield make.args(*plain, *caches, location, 4, 1e-5)
        own = make.randn(5, (4 + 2 + 4 + 2) * 16, dtype=dtype)
        yield make.args(own, None, make.randn(10, 16, dtype=dtype), angles, *caches, location, 4)
        yield make.args(*low, *caches, location, 4, whole=True)
        yield make.args(*plain, *caches, location, 4, 1e-5, True)
        one = [make.randn(3, 1, 4, 24, dtype=dtype) for _ in range(2)]
        weight = make.randn(6, 24, dtype=dtype)
        given = (make.randn(3, 200, dtype=dtype), None, weight, make.randn(3, 24))
        yield make.args(*given, *one, location[1:4] % 12, 5)
        yield make.args(*given, *one, location[1:4] % 12, 5, whole=True)
        for at in (1, 2):
            alone, turn = wide[at : at + 1], angles[at : at + 1]
            there = (*caches, location[at : at + 1], 4)
            yield make.args(alone, up[:1], low[2], turn, *there)
            yield make.args(alone, None, plain[2], None, *there, 1e-5)
            yield make.args(own[:1], None, low[2], turn, *there)
            yield make.args(own[:1], None, low[2], turn, *there, whole=True)
        # Heads that lanes of a CPU take.
        caches = [make.randn(4, 2, 8, 32, dtype=dtype) for _ in range(2)]
        wide, turn = make.randn(5, 12 * 32, dtype=dtype), make.randn(5, 32)
        weight = make.randn(10, 32, dtype=dtype)
        yield make.args(wide, None, weight[:6], None, *caches, location, 4, 1e-5)
        yield make.args(wide, None, weight, turn, *caches, location, 4)
    many = SPREAD_TOKENS + 44
    caches = [make.randn(40, 2, 8, 16) for _ in range(2)]
    given = (make.randn(many, 20 * 16), None, make.randn(18, 16), make.randn(many, 16))
    places = make.rand(320).argsort()[:many]
    yield make.args(*given, *caches, places, 8)
    yield make.args(*given, *caches, places, 8, whole=True)
    empty = (make.randn(0, 128), None, make.randn(6, 16), make.randn(0, 16))
    yield make.args(*empty, *(make.randn(4, 2, 8, 16) for _ in range(2)), location[:0], 4)


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
