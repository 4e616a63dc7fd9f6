"""From a fused QKV projection to the inputs of attention: queries, and keys and values in the paged
cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.cache.quantized import is_quantized
from cairn.ops.cache.write_kv import write_kv
from cairn.ops.call import Call
from cairn.ops.checks import INT64, check_caches, expect, refuse
from cairn.ops.cpu import avx512
from cairn.ops.pdl import pdl_option
from cairn.ops.registry import op
from cairn.ops.rotary import loops
from cairn.ops.rotary.kernels import heads_into_cache_kernel
from cairn.ops.rotary.split_norm_rope import (
    check_means,
    check_projection,
    programs_of,
    split_norm_rope,
)

HEADS_AT_ONCE, SPREAD_TOKENS = 16, 256
"""Heads per program, and the token count up to which a token's heads are spread over several
programs."""
NUMBERS_AT_ONCE = 4096
"""Elements per program for more tokens: few large programs."""


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
    means: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """split_norm_rope, with its k and the unchanged v written to the cache as by write_kv.

    In a row of `projected` the heads of v follow those of q, k and, where z has its own projection,
    z.

    Args:
        projected: [T, W], rows may be strided.
        added, weight, cos_sin, eps, whole, means: as in split_norm_rope.
        k_cache, v_cache, location: as in write_kv, changed.
        num_heads: h_q.
    Returns:
        (q [T, h_q, d], z [T, h_q or 0, d]), contiguous.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    kv_heads, dim = k_cache.shape[1], weight.shape[1]
    q, k, z = split_norm_rope.reference(
        projected, added, weight, cos_sin, num_heads, kv_heads, eps, whole, means
    )
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
def _(call: Call) -> None:
    name = "heads_into_cache"
    _, kv_heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.projected)
    check_projection(
        name,
        call.projected,
        call.added,
        call.weight,
        call.cos_sin,
        (call.num_heads, kv_heads),
        kv_heads,
    )
    check_means(name, call.means, call.weight, call, kv_heads)
    if call.k_cache.dtype != call.projected.dtype and not is_quantized(call.k_cache):
        refuse(name, "k_cache", f"is {call.k_cache.dtype}, `projected` {call.projected.dtype}")
    if dim != call.weight.shape[1]:
        refuse(
            name,
            "k_cache",
            f"has shape {list(call.k_cache.shape)}, heads of {call.weight.shape[1]}",
        )
    expect(name, "location", call.location, call.projected.shape[:1], INT64, call.projected, -1)


@heads_into_cache.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    tokens, (heads, dim) = call.projected.shape[0], call.weight.shape
    own = heads - call.num_heads - call.k_cache.shape[1]
    return call.projected.new_empty(tokens, call.num_heads, dim), call.projected.new_empty(
        tokens, own, dim
    )


def _accepts(call: Call) -> bool:
    dim = call.weight.shape[1]
    return (
        call.projected.stride(-1) == 1
        and call.projected.dtype == call.k_cache.dtype == call.v_cache.dtype
        and call.weight.is_contiguous()
        and (call.added is None or call.added.stride(-1) == 1)
        and (call.cos_sin is None or call.cos_sin.is_contiguous())
        and call.k_cache.stride() == call.v_cache.stride()
        and call.k_cache.stride()[2:] == (dim, 1)
        and gpu.within_32_bits(call.k_cache, dim=1)
    )


@heads_into_cache.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor]:
    tokens, (heads, dim), kv_heads = (
        call.projected.shape[0],
        call.weight.shape,
        call.k_cache.shape[1],
    )
    own = heads - call.num_heads - kv_heads
    q, z = (
        gpu.empty((tokens, n, dim), call.projected.dtype, call.projected.device)
        for n in (call.num_heads, own)
    )
    most = HEADS_AT_ONCE if tokens <= SPREAD_TOKENS else max(16, NUMBERS_AT_ONCE // dim)
    whole = call.whole and call.means is None
    programs, at_once, warps = programs_of(call.weight, call.num_heads, kv_heads, most, whole)
    pdl = gpu.supports_pdl(call.projected.device)
    if tokens:
        heads_into_cache_kernel[(tokens * (programs + 1),)](
            projected=call.projected,
            added=call.projected if call.added is None else call.added,
            weight=call.weight,
            cos_sin=call.projected if call.cos_sin is None else call.cos_sin,
            means=call.projected if call.means is None else call.means,
            q=q,
            z=z,
            k_cache=call.k_cache,
            v_cache=call.v_cache,
            location=call.location,
            row_stride=call.projected.stride(0),
            added_stride=0 if call.added is None else call.added.stride(0),
            page_stride=call.k_cache.stride(0),
            head_stride=call.k_cache.stride(1),
            eps=call.eps,
            SIZE=call.k_cache.shape[2],
            Q_HEADS=call.num_heads,
            KV_HEADS=kv_heads,
            ALL_HEADS=heads,
            V_HEAD=heads if call.added is None else call.num_heads + kv_heads,
            HALF=dim // 2,
            HP=gpu.next_power_of_2(dim // 2),
            PROGRAMS=programs + 1,
            HEADS=at_once,
            KVP=gpu.next_power_of_2(kv_heads),
            WHOLE=whole,
            SPANS=0 if call.means is None else call.means.shape[1],
            ADDED=call.added is not None,
            ROTATED=call.cos_sin is not None,
            PDL=pdl,
            num_warps=warps,
            **pdl_option(pdl),
        )
    return q, z


def _dense(call: Call) -> bool:
    given = (call.projected, call.added, call.weight, call.cos_sin, call.k_cache, call.v_cache)
    one_dtype = call.projected.dtype == call.k_cache.dtype == call.v_cache.dtype
    return one_dtype and call.means is None and all(x is None or x.is_contiguous() for x in given)


def _in_lanes(projected: Tensor, dim: int, whole: bool) -> bool:
    """Whether the AVX-512 loop applies, which processes 16 elements of a head at once and norms
    each head by itself."""
    rounded = avx512.PAIRS and projected.dtype == torch.bfloat16
    return rounded and dim % (2 * avx512.LANES) == 0 and not whole


@heads_into_cache.implementation("numba", devices=cpu.DEVICES, when=_dense)
def _(call: Call) -> tuple[Tensor, Tensor]:
    tokens, (heads, dim) = call.projected.shape[0], call.weight.shape
    own = heads - call.num_heads - call.k_cache.shape[1]
    q, z = (call.projected.new_empty(tokens, n, dim) for n in (call.num_heads, own))
    angles = cpu.array_or_empty(call.cos_sin, torch.float32, 2)
    cache = [cpu.as_array(x) for x in (call.k_cache, call.v_cache, call.location)]
    results = map(cpu.as_array, (q, z))
    given, norms = cpu.as_array(call.projected), cpu.as_array(call.weight)
    if call.added is None and _in_lanes(call.projected, dim, call.whole):
        loops.heads_in_lanes(given, norms, angles, *cache, np.float32(call.eps), *results)
    else:
        more = cpu.array_or_empty(call.added, call.projected.dtype, 2)
        loops.heads_into_cache(
            given, more, norms, angles, *cache, np.float32(call.eps), call.whole, *results
        )
    return q, z


@heads_into_cache.implementation("composed")
def _(call: Call) -> tuple[Tensor, Tensor]:
    """Two ops, each by its fastest implementation."""
    kv_heads = call.k_cache.shape[1]
    heads = call.num_heads, kv_heads
    norms = call.eps, call.whole, call.means
    q, k, z = split_norm_rope(call.projected, call.added, call.weight, call.cos_sin, *heads, *norms)
    v = _values(call.projected, call.added, call.weight, call.num_heads, kv_heads).unflatten(
        -1, (kv_heads, -1)
    )
    write_kv(k, v, call.k_cache, call.v_cache, call.location)
    return q, z
