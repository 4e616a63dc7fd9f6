"""Attention of row blocks of queries to the blocks and columns of keys that tables list."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Alternative, Draw, Point, Points, moved, short
from cairn.ops.call import Call
from cairn.ops.flash_attn.flash_attention import weigh
from cairn.ops.flash_attn.strides import strides
from cairn.ops.registry import op
from cairn.ops.sparse_flash_attn.convert_vertical_slash_indexes import (
    convert_vertical_slash_indexes,
)
from cairn.ops.sparse_flash_attn.kernels import attend_listed_kernel, single_columns_kernel
from cairn.ops.testing import Arguments, Cases, Make

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
        o: like q, written at every sequence's lines; 0 where nothing is seen.
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
            # What nobody sees may hold anything.
            seen = value.masked_fill(hidden.all(1).T.unsqueeze(2), 0)
            part, log = weigh(scores.masked_fill(hidden, -torch.inf), seen, None)
            sink[lines] = part.transpose(0, 1).to(o.dtype)
            logs[:, lines] = log


class Lists(NamedTuple):
    """What all heads of a row block are listed: [H] counts, [H, NS] and [H, NV] keys."""

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
    """Where the queries and the keys of every sequence lie, and its number."""
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
            *(call.block_count, call.block_offset, call.column_count, call.column_index, single),
            *(wide, call.column_index.shape[3], gpu.next_power_of_2(wide + 1) // 2, BLOCK, 256),
            num_warps=2,
        )
    attend_listed_kernel[(-(-call.max_seqlen_q // BLOCK), heads, batch)](
        *(
            call.q,
            call.k,
            call.v,
            call.o,
            call.lse,
            call.block_count,
            call.block_offset,
            call.column_count,
            single,
        ),
        *(
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.scale * (1.0 if call.softcap > 0 else LOG2_E),
            call.softcap,
        ),
        *(call.q.shape[-3], call.k.shape[-3], rows, wide, call.column_index.shape[3]),
        *(
            *strides(call.q),
            *strides(call.k),
            *strides(call.v),
            *strides(call.o),
            ahead[0] if ahead else 0,
            lse_head,
        ),
        *(
            heads,
            heads // call.k.shape[-2],
            call.q.shape[-1],
            width,
            BLOCK,
            keys,
            call.causal,
            call.softcap > 0,
        ),
        "ieee" if exact else "tf32",
        num_warps=8 if width > 128 or (exact and width > 64) else 4,
        num_stages=2 if width > 128 or exact else 3,
    )


def _lists(make: Make, rows: int, most: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Random counts [rows] and ascending keys [rows, count] of lists, some of them listed twice."""
    high = most - size // 2 if most > size else 1
    keys = [make.randint(0, high, count).sort().values for _ in range(rows)]
    lists = torch.stack(keys) if keys else make.randint(0, 1, 0, count)
    return make.randint(0, count + 1, rows).int(), lists.int()


def _drawn(
    make: Make,
    dtype: torch.dtype,
    lengths: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    dim: int,
    *,
    even: bool = False,
    causal: bool = True,
    softcap: float = 0.0,
    listed: tuple[int, int] = (4, 30),
) -> Arguments:
    """A call of the op.

    Args:
        lengths: (queries, keys) of every sequence; even: all as the first.
        heads: (H, Hk).
        listed: most blocks and columns of a row block.
    """
    batch, (q_heads, kv_heads) = len(lengths), heads
    queries, keys = ([pair[i] for pair in lengths] for i in (0, 1))
    longest, most = max(queries, default=0), max(keys, default=0)
    rows = -(-longest // BLOCK) + 1
    shape = (batch, q_heads, rows)
    blocks, columns = (
        [x.view(*shape, *x.shape[1:]) for x in _lists(make, batch * q_heads * rows, most, n, size)]
        for n, size in zip(listed, (BLOCK, 1), strict=True)
    )
    lead = ((batch, longest), (batch, most)) if even else ((sum(queries),), (sum(keys),))
    ends = [
        make.tensor([0, *torch.tensor(x, dtype=torch.int64).cumsum(0).tolist()], torch.int32)
        for x in (queries, keys)
    ]
    return make.args(
        make.randn(*lead[0], q_heads, dim, dtype=dtype),
        *(make.randn(*lead[1], kv_heads, dim, dtype=dtype) for _ in range(2)),
        make.empty(*lead[0], q_heads, dim, dtype=dtype),
        make.empty(*lead[0][:-1], q_heads, lead[0][-1]),
        *(*blocks, *columns, *((None, None) if even else ends)),
        *(longest, dim**-0.5, causal, softcap),
    )


@vertical_slash_attention.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield _drawn(make, dtype, ((7, 40), (7, 40)), (2, 1), 16, even=True)
        yield _drawn(make, dtype, ((100, 300), (3, 3), (0, 5), (65, 1)), (4, 2), 32)
        yield _drawn(make, dtype, ((130, 130),), (2, 2), 128, even=True, listed=(3, 100))
    single = torch.float32
    yield _drawn(make, single, ((1, 63),), (3, 1), 24, even=True, causal=False, softcap=2.0)
    yield _drawn(make, single, ((5, 9), (64, 100)), (2, 1), 7, causal=False, listed=(0, 20))
    yield _drawn(make, single, ((70, 100),), (1, 1), 16, softcap=30.0, listed=(3, 0))
    yield _drawn(make, single, ((66, 200),), (2, 1), 256, even=True)
    yield _drawn(make, single, (), (2, 1), 16)


vertical_slash_attention.tolerance(
    {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)},
    "sums in another order under a softmax; weights are rounded to the values' dtype",
)


def _tables(draw: Draw, heads: int, context: int, verticals: int, slashes: int) -> list[Tensor]:
    """Lists of random vertical lines and diagonals, the main one among them."""
    length = draw.full((1,), context, torch.int32)
    drawn = [
        torch.stack([draw.rand(context).argsort()[:n] for _ in range(heads)]).int().unsqueeze(0)
        for n in (verticals, slashes)
    ]
    lines, diagonals = drawn[0].sort().values, drawn[1].sort(descending=True).values
    diagonals[..., -1] = 0
    return list(convert_vertical_slash_indexes(length, length, lines, diagonals, context, 64, 64))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to all keys, [B, H, S, d]: more work, for the same layer."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@vertical_slash_attention.bench
def _(draw: Draw) -> Points:
    tiny = draw.sizes == "tiny"
    sizes = ((2, 100, 5, 4),) if tiny else ((8, 2048, 100, 8), (8, 32768, 1000, 32))
    for heads, context, verticals, slashes in sizes:
        q, k, v = (draw.randn(1, context, heads, 16 if tiny else 128) for _ in range(3))
        tables = _tables(draw, heads, context, verticals, slashes)
        listed = BLOCK * (BLOCK * tables[0].sum() + tables[2].sum())
        results = torch.empty_like(q), draw.full((1, heads, context), 0.0)
        plain = draw.args(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
        yield Point(
            f"{heads} heads, {short(context)}, {verticals} verticals, {slashes} slashes",
            draw.args(
                *(q, k, v, *results, *tables, None, None),
                *(context, q.shape[-1] ** -0.5, True, 0.0),
            ),
            moved(q, q, k, v),
            4.0 * q.shape[-1] * int(listed),
            (Alternative("sdpa", _sdpa, plain),),
        )
