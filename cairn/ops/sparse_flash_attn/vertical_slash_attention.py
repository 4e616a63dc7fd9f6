"""Attention of row blocks of queries to the blocks and columns of keys that tables list."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.flash_attn.flash_attention import weigh
from cairn.ops.flash_attn.strides import named_strides
from cairn.ops.registry import op
from cairn.ops.sparse_flash_attn.kernels import attend_listed_kernel, single_columns_kernel

BLOCK = 64
"""Queries of a row block, and keys of a block."""
LOG2_E = 1.4426950408889634


@op(mutates=("o", "lse"))
def vertical_slash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    scale: float,
    causal: bool,
    softcap: float,
) -> None:
    """Softmax attention in float32 of every row block of 64 queries to the keys listed for it.

    A key counts once, however often it is listed; one beyond the sequence does not.

    Args:
        q: [B, Sq, H, d], or [T, H, d] with cu_seqlens_q.
        k, v: [B, Sk, Hk, d], or [T', Hk, d] with cu_seqlens_k. Query head h reads h // (H / Hk).
        o: like q, written at every sequence's rows; 0 for queries without keys.
        lse: [B, H, Sq] or [H, T] float32, written: natural logarithm; +inf where nothing is seen.
        block_count, column_count: [B, H, R] int32, how many entries of the lists count.
        block_offset: [B, H, R, NS] int32, first keys of blocks of 64, ascending.
        column_index: [B, H, R, NV] int32, single keys, ascending.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, where sequences begin and end.
        max_seqlen_q: no sequence has more queries.
        scale: of the scores.
        causal: query i of m sees no key behind i + n - m of its n.
        softcap: c > 0: the score becomes c * tanh(score / c).
    """
    group = q.shape[-2] // k.shape[-2]
    tables = (block_count, block_offset, column_count, column_index)
    for own, keys, row in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        asked, sink, logs = q[own], o[own], lse[(*own[:-1], slice(None), own[-1])]
        key, value = (x[keys].float().repeat_interleave(group, 1) for x in (k, v))
        for number in range(-(-len(asked) // BLOCK)):
            lines = slice(number * BLOCK, min(len(asked), (number + 1) * BLOCK))
            listed = Lists(*(table[row, :, number] for table in tables))
            hidden = ~listed.keys(len(key)).unsqueeze(1)
            if causal:
                place = torch.arange(lines.start, lines.stop, device=q.device).unsqueeze(1)
                later = torch.arange(len(key), device=q.device) > place + len(key) - len(asked)
                hidden = hidden | later
            scores = torch.einsum("qhd,khd->hqk", asked[lines].float(), key) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            # Values that no query sees may be NaN.
            seen = value.masked_fill(hidden.all(1).T.unsqueeze(2), 0)
            part, log = weigh(scores.masked_fill(hidden, -torch.inf), seen, None)
            sink[lines] = part.transpose(0, 1).to(o.dtype)
            logs[:, lines] = log


class Lists(NamedTuple):
    """The lists of one row block, for all heads: [H] counts, [H, NS] and [H, NV] keys."""

    block_count: Tensor
    block_offset: Tensor
    column_count: Tensor
    column_index: Tensor

    def keys(self, length: int) -> Tensor:
        """[H, length] bool: the keys that are listed."""
        found = self.block_count.new_zeros((len(self.block_count), length + 1), dtype=torch.bool)
        for count, first, size in (
            (self.block_count, self.block_offset, BLOCK),
            (self.column_count, self.column_index, 1),
        ):
            number = torch.arange(first.shape[1], device=first.device)
            key = first.long().unsqueeze(2) + torch.arange(size, device=first.device)
            there = (number < count.unsqueeze(1)).unsqueeze(2) & (key >= 0) & (key < length)
            found.scatter_(1, torch.where(there, key, length).flatten(1), True)
        return found[:, :length]


Place = tuple[int | slice, ...]


def _sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Iterator[tuple[Place, Place, int]]:
    """The slices of queries and of keys of every sequence, and its index."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        yield from (((row, slice(None)), (row, slice(None)), row) for row in range(q.shape[0]))
        return
    ends = (x.tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    spans = ([slice(*pair) for pair in itertools.pairwise(x)] for x in ends)
    yield from (((own,), (keys,), row) for row, (own, keys) in enumerate(zip(*spans, strict=True)))


@vertical_slash_attention.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    batch, heads, rows, wide = call.block_offset.shape
    if not call.q.numel() or not batch or not call.max_seqlen_q:
        return
    width = max(16, gpu.next_power_of_2(call.q.shape[-1]))
    exact = call.q.dtype == torch.float32
    keys = max(16, min(BLOCK, (2048 if exact else 8192) // width))
    *ahead, lse_head, _ = call.lse.stride()
    single = gpu.empty(call.column_index.shape, call.column_index.dtype, call.column_index.device)
    if single.numel():
        single_columns_kernel[(batch * heads * rows,)](
            block_count=call.block_count,
            block_offset=call.block_offset,
            column_count=call.column_count,
            column_index=call.column_index,
            single=single,
            blocks_wide=wide,
            columns_wide=call.column_index.shape[3],
            half=gpu.next_power_of_2(wide + 1) // 2,
            BLOCK=BLOCK,
            CHUNK=256,
            num_warps=2,
        )
    attend_listed_kernel[(-(-call.max_seqlen_q // BLOCK), heads, batch)](
        q=call.q,
        k=call.k,
        v=call.v,
        o=call.o,
        lse=call.lse,
        block_count=call.block_count,
        block_offset=call.block_offset,
        column_count=call.column_count,
        single=single,
        cu_q=call.cu_seqlens_q,
        cu_k=call.cu_seqlens_k,
        factor=call.scale * (1.0 if call.softcap > 0 else LOG2_E),
        cap=call.softcap,
        even_q=call.q.shape[-3],
        even_k=call.k.shape[-3],
        rows=rows,
        blocks_wide=wide,
        columns_wide=call.column_index.shape[3],
        **named_strides("q", call.q, "batch", "token", "head"),
        **named_strides("k", call.k, "batch", "token", "head"),
        **named_strides("v", call.v, "batch", "token", "head"),
        **named_strides("o", call.o, "batch", "token", "head"),
        lse_batch=ahead[0] if ahead else 0,
        lse_head=lse_head,
        HEADS=heads,
        GROUP=heads // call.k.shape[-2],
        DIM=call.q.shape[-1],
        DP=width,
        BLOCK=BLOCK,
        KEYS=keys,
        CAUSAL=call.causal,
        CAPPED=call.softcap > 0,
        PRECISION="ieee" if exact else "tf32",
        num_warps=8 if width > 128 or (exact and width > 64) else 4,
        num_stages=2 if width > 128 or exact else 3,
    )


vertical_slash_attention.tolerance(
    {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)},
    "sums in another order under a softmax; weights are rounded to the values' dtype",
)
