"""Argument checks and the launch shared by the rotary ops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.rotary.kernels import rotate_kernel

COPY_BLOCK = 1024
WARPS = 4
"""Warps per program."""


@dataclass(frozen=True, slots=True)
class Store:
    """Where rotated keys and values go, as in `rotary_set_kv`; buffers and values [rows, width]."""

    value: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    location: Tensor
    k_scale: float
    v_scale: float


def check(
    op: str,
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
) -> None:
    """Raise BadArgument unless the shapes, dtypes and positions of a rotation are consistent."""
    expect(op, "positions", positions, dtypes=INDICES, like=query)
    expect(op, "query", query, dtypes=FLOATS)
    if head_size < 2:
        refuse(op, "head_size", f"is {head_size}")
    for name, x in (("query", query), ("key", key)):
        if x is None:
            continue
        expect(op, name, x, dtypes=(query.dtype,), like=query)
        if not _is_flat(x, positions.numel(), head_size) and (
            x.shape[:-2].numel() != positions.numel() or x.shape[-1:] != (head_size,)
        ):
            before = ", ".join(str(size) for size in positions.shape)
            wanted = f"[{before}, n * {head_size}] or [{before}, n, {head_size}]"
            refuse(op, name, f"has shape {list(x.shape)}, not {wanted}")
    dtypes = tuple({query.dtype: 0, FLOATS[0]: 0})
    expect(op, "cos_sin_cache", cos_sin_cache, (None, None), dtypes, like=query)
    width = cos_sin_cache.shape[1]
    if width % 2 or width > head_size:
        refuse(op, "cos_sin_cache", f"has {width} columns, not an even number up to {head_size}")
    expect_within(op, "positions", positions, cos_sin_cache.shape[0])


def _is_flat(x: Tensor, tokens: int, head_size: int) -> bool:
    return x.shape[:-1].numel() == tokens and x.shape[-1] % head_size == 0


def heads_of(x: Tensor, tokens: int, head_size: int) -> Tensor:
    """x [..., n, head_size] or [..., n * head_size] of `tokens` tokens as a view [..., n,
    head_size]."""
    flat = _is_flat(x, tokens, head_size)
    return x.unflatten(-1, (x.shape[-1] // head_size, head_size)) if flat else x


def strided(x: Tensor, tokens: int, head_size: int) -> Tensor | None:
    """x as [T, n, head_size] without a copy, or None where its strides do not allow a view or
    exceed what the kernel computes in int32."""
    heads = heads_of(x, tokens, head_size)
    if heads.stride(-1) != 1 or not gpu.within_32_bits(heads):
        return None
    try:
        return heads.view(tokens, *heads.shape[-2:])
    except RuntimeError:
        return None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, is_neox: bool) -> None:
    """Rotate x in place; cos, sin [T, rd / 2] float32."""
    tokens, half = cos.shape
    heads = heads_of(x, tokens, head_size)
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


def _inverts(scale: float) -> bool:
    """Whether x * (1 / scale) equals x / scale bit for bit: true for powers of two where both the
    scale and its inverse are normal float32 numbers."""
    mantissa, exponent = math.frexp(scale)
    return abs(mantissa) == 0.5 and -125 <= exponent <= 127


def accepts(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor
) -> bool:
    """Whether heads can be addressed by a token stride and a head stride."""
    tokens = positions.numel()
    return (
        positions.is_contiguous()
        and cos_sin_cache.stride(-1) == 1
        and strided(query, tokens, head_size) is not None
        and (key is None or strided(key, tokens, head_size) is not None)
    )


def launch(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    store: Store | None = None,
) -> None:
    """One launch of `rotate_kernel`, for arguments that pass `accepts`."""
    tokens, half = positions.numel(), cos_sin_cache.shape[-1] // 2
    q = strided(query, tokens, head_size)
    k = None if key is None else strided(key, tokens, head_size)
    assert q is not None and not (key is not None and k is None)
    heads, k_heads = q.shape[1], 0 if k is None else k.shape[1]
    at_once = min(16, gpu.next_power_of_2(max(1, heads, k_heads)))
    groups = -(-heads // at_once) + -(-k_heads // at_once)
    written: dict[str, Any] = dict.fromkeys(("k_buffer", "v_buffer", "value", "location"))
    written |= dict.fromkeys(("buffer_stride", "buffer_head_stride", "v_stride", "value_stride"), 0)
    width, scales = 0, (1.0, 1.0)
    if store is not None:
        written = {
            "k_buffer": store.k_buffer,
            "v_buffer": store.v_buffer,
            "value": store.value,
            "location": store.location,
            "buffer_stride": store.k_buffer.stride(0),
            "buffer_head_stride": head_size,
            "v_stride": store.v_buffer.stride(0),
            "value_stride": store.value.stride(0),
        }
        width, scales = store.value.shape[1], (store.k_scale, store.v_scale)
        groups += -(-width // COPY_BLOCK)
    scaling = "none" if scales == (1.0, 1.0) else "over"
    if scaling == "over" and all(_inverts(scale) for scale in scales):
        scaling, scales = "times", (1 / scales[0], 1 / scales[1])
    rest = head_size - 2 * half if store is not None else 0
    pdl = uses_pdl(query.device, tokens, groups * WARPS)
    if tokens and groups:
        rotate_kernel[(tokens * groups,)](
            **written,
            q=q,
            k=k,
            positions=positions,
            cos_sin=cos_sin_cache,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            k_stride=(q if k is None else k).stride(0),
            k_head_stride=(q if k is None else k).stride(1),
            row_stride=cos_sin_cache.stride(0),
            q_heads=heads,
            k_heads=k_heads,
            width=width,
            k_scale=scales[0],
            v_scale=scales[1],
            HALF=half,
            HP=gpu.next_power_of_2(half),
            GROUPS=groups,
            HEADS=at_once,
            REST=rest,
            RP=gpu.next_power_of_2(max(1, rest)),
            BLOCK=COPY_BLOCK,
            NEOX=is_neox,
            SCALING=scaling,
            PDL=pdl,
            num_warps=WARPS,
            **pdl_option(pdl),
        )
