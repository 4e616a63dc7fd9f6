"""The conversion against a loop over row blocks, and the keys that its tables must cover."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import convert_vertical_slash_indexes, convert_vertical_slash_indexes_mergehead
from tests.ops.sampling.variants import runnable_on


@dataclass
class RowBlock:
    """The rules for one row block, step by step."""

    start: int
    q: int
    kv: int
    m: int
    n: int
    causal: bool
    blocks: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)

    def emit(self, low: int, high: int) -> None:
        self.blocks += range(low, min(high, self.kv), self.n)

    def convert(self, verticals: list[int], slashes: list[int]) -> None:
        end = self.start + self.m + (self.kv - self.q if self.causal else self.kv)
        todo = list(slashes)
        while len(todo) > 1 and todo[0] >= end:
            todo.pop(0)
        if todo and todo[0] <= end:
            high = max(end - todo.pop(0), self.m)
            low = high - self.m
        else:
            todo = []
            low = end if self.causal else self.kv
            high = low + self.n
        waiting = list(verticals)
        while True:
            while waiting and waiting[0] < high:
                vertical = waiting.pop(0)
                if vertical < low:
                    self.columns.append(vertical)
            if not todo or (not self.causal and todo[0] < self.start):
                break
            x = max(end - todo.pop(0), self.m)
            if x > high + self.m:
                self.emit(low, high)
                low, high = x - self.m, x
            elif x > high:
                high += self.m
        self.emit(low, high)
        if not self.causal:
            self.columns += [v for v in waiting if v < self.kv]


def lists(g: torch.Generator, heads: int, count: int, most: int, down: bool) -> Tensor:
    rows = [torch.randperm(most, generator=g)[:count] for _ in range(2 * heads)]
    return torch.stack(rows).sort(dim=1, descending=down).values.view(2, heads, count).int()


def check(found: list[Tensor], q: Tensor, kv: Tensor, v: list, s: list, m: int, n: int, c: bool):
    """Check all tables; v and s hold a list per sequence and head."""
    block_count, block_offset, column_count, column_index = (x.cpu() for x in found)
    batch, heads, rows = block_count.shape
    for b, h, r in ((b, h, r) for b in range(batch) for h in range(heads) for r in range(rows)):
        own = RowBlock(r * m, int(q[b]), int(kv[b]), m, n, c)
        if own.start < own.q:
            own.convert(v[b][h], s[b][h])
        for listed, count, table in (
            (own.blocks, block_count, block_offset),
            (own.columns, column_count, column_index),
        ):
            assert int(count[b, h, r]) == len(listed), (b, h, r)
            spare = table.shape[-1] - len(listed)
            assert table[b, h, r].tolist() == listed + [0] * spare, (b, h, r)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "context, kv, m, n", [(1, 1, 1, 1), (100, 100, 8, 8), (63, 200, 7, 16), (100, 1000, 64, 64)]
)
def test_against_the_rules(
    context: int, kv: int, m: int, n: int, causal: bool, device: str
) -> None:
    g = torch.Generator().manual_seed(context)
    q_lengths = torch.tensor([context, context // 2], dtype=torch.int32)
    kv_lengths = torch.tensor([kv, max(kv - 7, context // 2)], dtype=torch.int32)
    most = max(kv + 20, 30)
    v, s = lists(g, 3, 12, most, False), lists(g, 3, 11, most, True)
    s[:, 0, -1] = 0
    given = [x.to(device) for x in (q_lengths, kv_lengths, v, s)]
    for name in runnable_on(convert_vertical_slash_indexes, device):
        found = convert_vertical_slash_indexes.using(name)(*given, context, m, n, causal)
        assert all(x.dtype == torch.int32 for x in found)
        check(found, q_lengths, kv_lengths, v.tolist(), s.tolist(), m, n, causal)


def test_bands_that_touch_share_blocks(device: str) -> None:
    lengths = torch.tensor([32], dtype=torch.int32)
    v = torch.tensor([[[1, 9, 20, 30]]], dtype=torch.int32)
    s = torch.tensor([[[20, 16, 12, 6, 5, 0]]], dtype=torch.int32)
    given = [x.to(device) for x in (lengths, lengths, v, s)]
    for name in runnable_on(convert_vertical_slash_indexes, device):
        found = convert_vertical_slash_indexes.using(name)(*given, 32, 4, 8)
        check(found, lengths, lengths, v.tolist(), s.tolist(), 4, 8, True)
        # Keys 8 to 20 and 22 to 32, each in two blocks.
        assert found[1][0, 0, -1, :4].tolist() == [8, 16, 22, 30], name


@pytest.mark.parametrize("causal", [True, False])
def test_heads_use_the_first_entries(causal: bool, device: str) -> None:
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([100, 40], dtype=torch.int32)
    v, s = lists(g, 3, 12, 120, False), lists(g, 3, 9, 120, True)
    counts = torch.tensor([[12, 0, 5], [9, 4, 0]], dtype=torch.int32)
    used_v, used_s = (
        [[row[:n] for row, n in zip(one, count, strict=True)] for one in x.tolist()]
        for x, count in zip((v, s), counts.tolist(), strict=True)
    )
    given = [x.to(device) for x in (lengths, lengths, v, s, *counts)]
    for name in runnable_on(convert_vertical_slash_indexes_mergehead, device):
        call = convert_vertical_slash_indexes_mergehead.using(name)
        check(call(*given, 100, 8, 8, causal), lengths, lengths, used_v, used_s, 8, 8, causal)


def test_tables_cover_what_was_asked_for_and_no_key_twice() -> None:
    g = torch.Generator().manual_seed(2)
    q, kv, size = 100, 164, 8
    lengths = torch.tensor([[q], [kv]], dtype=torch.int32)
    v, s = lists(g, 4, 15, kv, False)[:1], lists(g, 4, 10, kv, True)[:1]
    s[..., -1] = 0
    block_count, block_offset, column_count, column_index = convert_vertical_slash_indexes(
        *lengths, v, s, q, size, size
    )
    for h in range(4):
        for r in range(-(-q // size)):
            begins = block_offset[0, h, r, : block_count[0, h, r]].tolist()
            keys = [key for begin in begins for key in range(begin, begin + size)]
            keys += column_index[0, h, r, : column_count[0, h, r]].tolist()
            assert len(keys) == len(set(keys))
            for query in range(r * size, min(r * size + size, q)):
                position = query + kv - q
                wanted = {position - slash for slash in s[0, h].tolist()}
                wanted |= set(v[0, h].tolist())
                missing = {key for key in wanted if 0 <= key <= position} - set(keys)
                assert not missing, (h, r, query)


Q = torch.tensor([8], dtype=torch.int32)
LIST = torch.zeros(1, 2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    "argument, given",
    [
        ("q_seqlens", (Q.long(), Q, LIST, LIST, 8, 4, 4)),
        ("kv_seqlens", (Q, Q.repeat(2), LIST, LIST, 8, 4, 4)),
        ("vertical_indexes", (Q, Q, LIST[0], LIST, 8, 4, 4)),
        ("slash_indexes", (Q, Q, LIST, LIST[:, :1], 8, 4, 4)),
        ("slash_indexes", (Q, Q, LIST, LIST[..., :0], 8, 4, 4)),
        ("context_size", (Q, Q, LIST, LIST, -1, 4, 4)),
        ("block_size_M", (Q, Q, LIST, LIST, 8, 0, 4)),
        ("block_size_N", (Q, Q, LIST, LIST, 8, 8, 4)),
    ],
)
def test_refuses(argument: str, given: tuple) -> None:
    with pytest.raises(BadArgument, match=f"`{argument}`"):
        convert_vertical_slash_indexes(*given)
    counts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(BadArgument, match="`slash_indices_count`"):
        convert_vertical_slash_indexes_mergehead(Q, Q, LIST, LIST, counts, counts[:1], 8, 4, 4)
