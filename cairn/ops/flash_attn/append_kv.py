"""Write of new keys and values at the ends of their sequences in a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.flash_attn.kernels import append_kernel
from cairn.ops.flash_attn.strides import named_strides
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op

NUMBERS = 1024
"""Elements per program, which copies heads of a key or of a value."""


@op(mutates=("k_cache", "v_cache"))
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    cu_seqlens: Tensor | None,
    page_table: Tensor | None,
    batch_idx: Tensor | None,
) -> None:
    """Write the j-th new key and value of sequence b at position seqlens[b] + j.

    Args:
        k, v: [B, Sn, Hk, d] and [.., dv], or [T, Hk, ..] with cu_seqlens; rows outside of all
            sequences are ignored.
        k_cache, v_cache: [B', Sk, Hk, d] and [.., dv], or [pages, P, Hk, ..] with page_table.
        seqlens: [B] int32.
        cu_seqlens: [B + 1] int32, cumulative lengths of the new keys.
        page_table: [B, n] int32.
        batch_idx: [B] int32, row of the cache for each sequence.
    """
    row, place = positions(k, cu_seqlens)
    lines = torch.arange(len(row), device=k.device)
    if cu_seqlens is not None:
        lines = lines[(lines >= cu_seqlens[0]) & (lines < cu_seqlens[-1])]
    row, slot = row[lines], (seqlens[row] + place).long()[lines]
    if page_table is not None:
        size = k_cache.shape[1]
        at = (page_table[row, slot // size].long(), slot % size)
    else:
        at = (row if batch_idx is None else batch_idx[row].long(), slot)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.index_put_(at, new.reshape(-1, *new.shape[-2:])[lines])


def positions(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sequence of every row of x ([B, S, ..], or ragged) and its position in the sequence: [n]
    int64. Rows outside of all sequences have position 0."""
    if cu_seqlens is None:
        shape = x.shape[:2]
        row = torch.arange(shape[0], device=x.device).unsqueeze(1).expand(shape)
        return row.flatten(), torch.arange(shape[1], device=x.device).expand(shape).flatten()
    line = torch.arange(x.shape[0], device=x.device)
    ends = cu_seqlens[1:].long()
    row = torch.searchsorted(ends, line, right=True)
    inside = (row < ends.numel()) & (line >= cu_seqlens[0])
    row = row.clamp(max=max(0, ends.numel() - 1))
    return row, torch.where(inside, line - cu_seqlens.long()[row], 0)


@append_kv.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    lines, (heads, dim), wide = call.k.shape[:-2].numel(), call.k.shape[-2:], call.v.shape[-1]
    if call.k.numel() == 0 or call.seqlens.numel() == 0:
        return
    rows, *widths = (gpu.next_power_of_2(number) for number in (call.seqlens.numel(), dim, wide))
    at_once = min(gpu.next_power_of_2(heads), max(1, NUMBERS // max(widths)))
    parts, warps = -(-heads // at_once), gpu.warps_for(at_once * max(widths))
    pdl = uses_pdl(call.k.device, lines, 2 * parts * warps)
    append_kernel[(2 * parts * lines,)](
        k=call.k,
        v=call.v,
        k_cache=call.k_cache,
        v_cache=call.v_cache,
        seqlens=call.seqlens,
        cu_seqlens=call.cu_seqlens,
        page_table=call.page_table,
        batch_idx=call.batch_idx,
        count=call.k.shape[-3],
        batch=call.seqlens.numel(),
        **named_strides("k", call.k, "row", "token", "head"),
        **named_strides("v", call.v, "row", "token", "head"),
        **named_strides("to", call.k_cache, "page", "slot", "head"),
        **named_strides("into", call.v_cache, "page", "slot", "head"),
        table_stride=0 if call.page_table is None else call.page_table.stride(0),
        HEADS=heads,
        DIM=dim,
        WIDE=wide,
        SIZE=call.k_cache.shape[1],
        ROWS=rows,
        PARTS=parts,
        HP=at_once,
        DP=widths[0],
        VP=widths[1],
        ONE=call.cu_seqlens is None and call.k.shape[-3] == 1,
        PDL=pdl,
        num_warps=warps,
        **pdl_option(pdl),
    )
