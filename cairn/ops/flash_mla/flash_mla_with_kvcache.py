"""FlashMLA's interface for latent attention over a paged cache, of all keys or of selected
slots."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache.quantized import BYTES
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, INDICES, INT32, expect, expect_within, refuse
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op
from cairn.ops.sparse_mla import attend_launch, records
from cairn.ops.sparse_mla.paged_mla import paged_mla
from cairn.ops.sparse_mla.sparse_mla import sparse_mla

NAME = "flash_mla_with_kvcache"


@op
def flash_mla(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_mla_with_kvcache`, where a quantised cache holds its own scales.

    Args:
        q: [B, Sq, H, D] float32, bfloat16 or float16.
        k_cache: [pages, P, 1, D] of its dtype, or [pages, P, 1, bytes] uint8 (`mla_kv_store`).
        block_table, cache_seqlens, head_dim_v, causal, indices: as in `flash_mla_with_kvcache`.
        softmax_scale: of the dot products.
    Returns:
        (out [B, Sq, H, head_dim_v] of q's dtype, lse [B, H, Sq] float32).
    Raises:
        BadArgument: as in `flash_mla_with_kvcache`.
    """
    batch, length = q.shape[:2]
    lines, cache = q.flatten(0, 1), k_cache.squeeze(2)
    if indices is not None:
        cells = indices.flatten(0, 1)
        count = torch.full((len(lines),), cells.shape[1], dtype=torch.int32, device=q.device)
        o, lse = sparse_mla.reference(lines, cache, cells, count, softmax_scale, head_dim_v)
    else:
        assert block_table is not None and cache_seqlens is not None
        row, end = _rows(cache_seqlens, length, causal)
        given = (block_table, row, end, softmax_scale, head_dim_v)
        o, lse = paged_mla.reference(lines, cache, *given)
    return _shaped(o.to(q.dtype), lse, batch, length)


def _rows(cache_seqlens: Tensor, length: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The sequence of each query, [B * Sq] int64, and the number of keys that it sees, [B * Sq]
    int32."""
    device = cache_seqlens.device
    row = torch.arange(len(cache_seqlens), device=device).repeat_interleave(length)
    end = cache_seqlens.int().repeat_interleave(length)
    if causal:
        behind = torch.arange(length - 1, -1, -1, dtype=torch.int32, device=device)
        end = end - behind.repeat(len(cache_seqlens))
    return row, end


def _shaped(o: Tensor, lse: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Results in FlashMLA's shapes; the lse of a query without a key is +inf."""
    lse = lse.masked_fill(lse.isneginf(), torch.inf).unflatten(0, (batch, length))
    return o.unflatten(0, (batch, length)), lse.transpose(1, 2).contiguous()


@flash_mla.check
def _(call: Call) -> None:
    q, cache = call.q, call.k_cache
    expect(NAME, "q", q, 4, FLOATS, dense=-1)
    batch, length, heads, width = q.shape
    if not heads:
        refuse(NAME, "q", f"has shape {list(q.shape)}: no head")
    if not 1 <= call.head_dim_v <= width:
        refuse(NAME, "head_dim_v", f"is {call.head_dim_v}, not 1 to the {width} numbers of a head")
    expect(NAME, "k_cache", cache, (None, None, 1, None), (q.dtype, BYTES), q, dense=1)
    rope = width - call.head_dim_v
    size = records.check_cache(NAME, cache.squeeze(2), call.head_dim_v, rope, q, q.dtype)
    if call.indices is not None:
        expect(NAME, "indices", call.indices, (batch, length, None), INT32, q)
        if call.causal:
            refuse(NAME, "causal", "is True, but `indices` say what each query sees")
        return
    if call.block_table is None or call.cache_seqlens is None:
        name = "block_table" if call.block_table is None else "cache_seqlens"
        refuse(NAME, name, "is None, and so is `indices`")
    expect(NAME, "block_table", call.block_table, (batch, None), INT32, q, dense=1)
    expect(NAME, "cache_seqlens", call.cache_seqlens, (batch,), INDICES, q)
    expect_within(NAME, "cache_seqlens", call.cache_seqlens, call.block_table.shape[1] * size + 1)


def _fits(call: Call) -> bool:
    near = call.indices is None or call.indices.is_contiguous()
    cache = call.k_cache.squeeze(2)
    return near and attend_launch.accepts(call.q.flatten(0, 1), cache, call.head_dim_v)


@flash_mla.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> tuple[Tensor, Tensor]:
    q, cache, indices = call.q, call.k_cache.squeeze(2), call.indices
    batch, length = q.shape[:2]
    lines = q.flatten(0, 1)
    if indices is not None:
        cells = indices.flatten(0, 1)
        count = torch.full((len(lines),), cells.shape[1], dtype=torch.int32, device=q.device)
        candidates = attend_launch.Candidates(count, cells.shape[1], cells)
    else:
        row, end = _rows(call.cache_seqlens, length, call.causal)
        reach = call.block_table.shape[1] * cache.shape[1]
        candidates = attend_launch.Candidates(end, reach, table=call.block_table, row=row)
    o, lse, _ = attend_launch.attend(
        lines, cache, candidates, call.softmax_scale, call.head_dim_v, None, q.dtype
    )
    return _shaped(o, lse, batch, length)


@flash_mla.front
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | None = None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over cached rows that are the keys of all heads; their first head_dim_v
    elements are the values (FlashMLA).

    Args:
        q: [B, Sq, H, D] float32, bfloat16 or float16, or with descale_q float8_e4m3fn.
        k_cache: [pages, P, 1, D] of q's dtype; with is_fp8_kvcache and indices the records of
            `mla_kv_store`, [pages, P, 1, bytes] uint8; with is_fp8_kvcache and without indices
            [pages, P, 1, D] float8_e4m3fn.
        block_table: [B, n] int32, pages of each sequence; ignored with indices.
        cache_seqlens: [B] int32 or int64, keys of each sequence; ignored with indices.
        head_dim_v: elements of a value.
        tile_scheduler_metadata, num_splits: results of `get_mla_metadata`; ignored.
        softmax_scale: of the dot products; None: D^-0.5.
        causal: query s sees n - (Sq - 1 - s) keys; not with indices.
        descale_q, descale_k: [1] float32, factors of q and of a float8 k_cache; None: 1.
        is_fp8_kvcache: the cache is in float8.
        indices: [B, Sq, topk] int32, the slots, page * P + offset, that each query reads; invalid
            ones are ignored. None: all keys of the sequence.
    Returns:
        (out [B, Sq, H, head_dim_v] of q's dtype, or bfloat16 of a float8 q; lse [B, H, Sq] float32,
        natural logarithm); without a key out is 0 and lse +inf.
    Raises:
        BadArgument: for another shape, dtype or device, or arguments that cannot be combined.
    """
    expect(NAME, "q", q, 4, (*FLOATS, E4M3), dense=-1)
    expect(NAME, "k_cache", k_cache, (None, None, 1, None), (*FLOATS, BYTES, E4M3), q, 1)
    small = k_cache.dtype in (BYTES, E4M3)
    if is_fp8_kvcache != small:
        refuse(NAME, "is_fp8_kvcache", f"is {is_fp8_kvcache}, but `k_cache` is {k_cache.dtype}")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    factor: Tensor | None = None
    if q.dtype == E4M3 or k_cache.dtype == E4M3:
        # Every e4m3 value is exact in bfloat16.
        kind = torch.bfloat16 if q.dtype == E4M3 else q.dtype
        for name, number in (("descale_q", descale_q), ("descale_k", descale_k)):
            if number is not None:
                expect(NAME, name, number, (1,), FLOAT32, q)
        factor = descale_k if k_cache.dtype == E4M3 else None
        own = q.float()
        for number in (descale_q, factor):
            own = own if number is None else own * number
        q, k_cache = own.to(kind), k_cache.to(kind)
    o, lse = flash_mla(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal, indices)
    return (o if factor is None else (o.float() * factor).to(o.dtype)), lse


@flash_mla.front
def flash_mla_with_kvcache_sm90(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | None = None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Alias of `flash_mla_with_kvcache`.

    Args:
        q, k_cache, block_table, cache_seqlens, head_dim_v: as in `flash_mla_with_kvcache`.
        tile_scheduler_metadata, num_splits, softmax_scale, causal: likewise.
        descale_q, descale_k, is_fp8_kvcache, indices: likewise.
    Returns:
        (out, lse), as from `flash_mla_with_kvcache`.
    Raises:
        BadArgument: as there.
    """
    return flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        descale_q,
        descale_k,
        is_fp8_kvcache,
        indices,
    )


flash_mla.tolerance(sparse_mla.tolerances, sparse_mla.tolerance_reason)
