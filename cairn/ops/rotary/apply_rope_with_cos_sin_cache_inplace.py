"""Rotary position embedding in place, with the write of keys and values to a cache of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.memory.rows import store_rows
from cairn.ops.registry import op
from cairn.ops.rotary import launch
from cairn.ops.rotary.rotary_embedding import rotary_embedding

NAME = "apply_rope_with_cos_sin_cache_inplace"
E4M3_MAX = 448.0
STORED = (*FLOATS, torch.float8_e4m3fn)


@dataclass(slots=True)
class FusedSetKVBufferArg:
    """The KV cache write that `apply_rope_with_cos_sin_cache_inplace` fuses with the rotation.

    Attributes:
        value: [T, nk * dv] or [T, nk, dv], the tokens' values.
        k_buffer: [slots, nk * d] or [slots, nk, d], changed.
        v_buffer: [slots, nk * dv] or [slots, nk, dv], changed.
        k_scale, v_scale: keys and values are divided by these before they are stored; None: 1.
        cache_loc: [T] int32 or int64, the slot of each token, all different; tokens with a negative
            slot are not written.
    """

    value: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    k_scale: float | None = None
    v_scale: float | None = None
    cache_loc: Tensor | None = None


@op(mutates=("query", "key", "k_buffer", "v_buffer"))
def rotary_set_kv(
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
    """rotary_embedding; then k_buffer[cache_loc] = key / k_scale and the same for the value.

    Args:
        positions, query, key, head_size, cos_sin_cache, is_neox: as in rotary_embedding.
        value, k_buffer, v_buffer, cache_loc: as in FusedSetKVBufferArg; values for float8 e4m3
            buffers are clamped to +-448.
        k_scale, v_scale: keys and values are divided by these, in float32, before they are stored.
    """
    rotary_embedding.reference(positions, query, key, head_size, cos_sin_cache, is_neox)
    for x, buffer, scale in ((key, k_buffer, k_scale), (value, v_buffer, v_scale)):
        stored = x.float() / scale
        if buffer.dtype == torch.float8_e4m3fn:
            stored = stored.clamp(-E4M3_MAX, E4M3_MAX)
        rows = stored.to(buffer.dtype).reshape(len(cache_loc), *buffer.shape[1:])
        if buffer.dtype == torch.float8_e4m3fn:
            # Not every device can index float8.
            buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
        store_rows(buffer, cache_loc, rows)


@rotary_set_kv.check
def _(call: Call) -> None:
    launch.check(NAME, call.positions, call.query, call.key, call.head_size, call.cos_sin_cache)
    tokens = call.positions.numel()
    expect(NAME, "value", call.value, dtypes=FLOATS, like=call.query)
    if call.value.dim() not in (2, 3) or call.value.shape[0] != tokens:
        refuse(NAME, "value", f"has shape {list(call.value.shape)}, not [{tokens}, nk * dv]")
    expect(NAME, "cache_loc", call.cache_loc, (tokens,), INDICES, like=call.query, dense=1)
    for name, buffer, x in (
        ("k_buffer", call.k_buffer, call.key),
        ("v_buffer", call.v_buffer, call.value),
    ):
        expect(NAME, name, buffer, dtypes=STORED, like=call.query)
        width = x.numel() // tokens if tokens else buffer.shape[1:].numel()
        if buffer.dim() not in (2, 3) or buffer.shape[1:].numel() != width:
            wanted = f"[slots, {width}], the numbers of a token"
            refuse(NAME, name, f"has shape {list(buffer.shape)}, not {wanted}")
        expect_within(NAME, "cache_loc", call.cache_loc, buffer.shape[0], None)


def _accepts(call: Call) -> bool:
    rows = (call.value, call.k_buffer, call.v_buffer)
    return (
        launch.accepts(call.positions, call.query, call.key, call.head_size, call.cos_sin_cache)
        and all(x[:1].is_contiguous() for x in rows)
        and all(x.dtype in FLOATS for x in rows)
    )


@rotary_set_kv.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> None:
    v, k_rows, v_rows = (x.flatten(1) for x in (call.value, call.k_buffer, call.v_buffer))
    store = launch.Store(v, k_rows, v_rows, call.cache_loc, call.k_scale, call.v_scale)
    launch.launch(
        call.positions,
        call.query,
        call.key,
        call.head_size,
        call.cos_sin_cache,
        call.is_neox,
        store,
    )


@rotary_set_kv.front
def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    fused_set_kv_buffer_arg: FusedSetKVBufferArg | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """rotary_embedding of query and key; with a FusedSetKVBufferArg the same launch also writes
    each token's rotated key and its value to its slot of a KV cache.

    Args:
        positions, query, key, head_size, is_neox: as in rotary_embedding.
        cos_sin_cache: [max, rd] float32 = [cos | sin], rd / 2 of each.
        fused_set_kv_buffer_arg: the cache write; None: no write.
        enable_pdl: ignored.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) a position or slot out of
            range.
    """
    expect(NAME, "cos_sin_cache", cos_sin_cache, dtypes=(torch.float32,))
    given = fused_set_kv_buffer_arg
    if given is None:
        rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
        return
    if given.cache_loc is None:
        refuse(NAME, "fused_set_kv_buffer_arg", "has no cache_loc")
    rotary_set_kv(
        positions,
        query,
        key,
        head_size,
        cos_sin_cache,
        value=given.value,
        k_buffer=given.k_buffer,
        v_buffer=given.v_buffer,
        cache_loc=given.cache_loc,
        k_scale=1.0 if given.k_scale is None else float(given.k_scale),
        v_scale=1.0 if given.v_scale is None else float(given.v_scale),
        is_neox=is_neox,
    )
