"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.sparse_flash_attn.convert_vertical_slash_indexes import (
    convert_vertical_slash_indexes,
    convert_vertical_slash_indexes_mergehead,
)
from cairn.ops.sparse_flash_attn.vertical_slash_attention import BLOCK, vertical_slash_attention
from cairn.ops.testing import Arguments, Cases, Make


def _lists(make: Make, heads: int, count: int, most: int, down: bool) -> Tensor:
    """[2, heads, count] distinct integers below `most`, sorted; 0 is the last of those that go
    down."""
    rows = [make.rand(most - 1).argsort()[:count] + 1 for _ in range(2 * heads)]
    drawn = torch.stack(rows).sort(dim=1, descending=down).values.view(2, heads, count)
    if down:
        drawn[..., -1] = 0
    return drawn.to(torch.int32)


@convert_vertical_slash_indexes.cases
def _(make: Make) -> Cases:
    causal = True
    for context, kv, m, n in ((100, 130, 8, 8), (63, 63, 7, 16), (40, 1000, 16, 64)):
        q_lengths = make.tensor([context, context // 2], dtype=torch.int32)
        kv_lengths = make.tensor([kv, kv - context // 3], dtype=torch.int32)
        lists = (_lists(make, 3, 12, kv, False), _lists(make, 3, 9, kv, True))
        yield make.args(q_lengths, kv_lengths, *lists, context, m, n, causal)
        causal = not causal
    yield make.args(q_lengths, kv_lengths, lists[0][..., :0], lists[1] + 2000, 100, 8, 8)
    yield make.args(q_lengths[:0], kv_lengths[:0], lists[0][:0], lists[1][:0], 100, 8, 8)


@convert_vertical_slash_indexes_mergehead.cases
def _(make: Make) -> Cases:
    q_lengths = make.tensor([100, 77], dtype=torch.int32)
    kv_lengths = make.tensor([130, 77], dtype=torch.int32)
    lists = (_lists(make, 3, 12, 130, False), _lists(make, 3, 9, 130, True))
    counts = make.tensor([[12, 0, 5], [9, 4, 0]], dtype=torch.int32)
    for causal in (True, False):
        yield make.args(q_lengths, kv_lengths, *lists, *counts, 100, 8, 8, causal)
    none = (x[:0] for x in (q_lengths, kv_lengths, *lists))
    yield make.args(*none, *counts, 100, 8, 8)


def _kernel_lists(make: Make, rows: int, most: int, count: int, size: int) -> tuple[Tensor, Tensor]:
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
        [
            x.view(*shape, *x.shape[1:])
            for x in _kernel_lists(make, batch * q_heads * rows, most, n, size)
        ]
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
        *blocks,
        *columns,
        *((None, None) if even else ends),
        longest,
        dim**-0.5,
        causal,
        softcap,
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
