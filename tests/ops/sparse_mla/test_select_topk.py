"""The selection against sorting in Python, and its cells against the page table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import select_topk
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from tests.ops.sampling.variants import runnable_on

L = 300


def chosen(logits: list[float], topk: int) -> list[int]:
    """Larger first, then lower position; NaN as -inf; ascending."""
    if len(logits) <= topk:
        found = list(range(len(logits)))
    else:
        worth = [-math.inf if math.isnan(x) else x for x in logits]
        found = sorted(sorted(range(len(worth)), key=lambda p: (-worth[p], p))[:topk])
    return found + [-1] * (topk - len(found))


def lines() -> dict[str, Tensor]:
    """[L] of every kind that is not just random."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(L, generator=g)
    half = normal.clone()
    half[torch.randperm(L, generator=g)[: L // 2]] = math.nan
    huge = torch.zeros(L)
    huge[217] = 3e38
    zeros = torch.where(normal > 0, 0.0, -0.0)
    plateau = normal.sort(descending=True).values.clone()
    plateau[20:80] = plateau[20]
    plateau = plateau[torch.randperm(L, generator=g)]
    return {
        "random": normal,
        "equal": torch.full((L,), 2.5),
        "zero": torch.zeros(L),
        "signed zeros": zeros,
        "-inf": torch.full((L,), -math.inf),
        "nan": torch.full((L,), math.nan),
        "half nan": half,
        "denormal": torch.randint(-50, 50, (L,), generator=g) * 1e-45,
        "up": normal.sort().values,
        "down": normal.sort(descending=True).values,
        "huge": huge,
        "plateau": plateau,
    }


@pytest.mark.parametrize("topk", [1, 16, 48, L - 1, L, L + 5])
@pytest.mark.parametrize("kind", lines())
def test_against_sorting(kind: str, topk: int, device: str) -> None:
    line = lines()[kind]
    count = torch.tensor([L, L - 1, topk - 1, topk, topk + 1, 0, 1], dtype=torch.int32)
    count.clamp_(max=L)
    logits = line.repeat(len(count), 1)
    wanted = [chosen(line[:n].tolist(), topk) for n in count.tolist()]
    given = (logits.to(device), count.to(device), topk)
    for name in [name for name in runnable_on(select_topk, device) if name != "triton"]:
        assert select_topk.using(name)(*given).tolist() == wanted, name


def test_invisible_logits_are_not_read(device: str) -> None:
    logits = torch.full((4, 50), math.nan, device=device)
    logits[:, 10:30] = torch.arange(20.0, device=device)
    count = torch.tensor([20, 8, 0, 20], dtype=torch.int32, device=device)
    start = torch.tensor([10, 10, 50, 10], dtype=torch.int32, device=device)
    got = select_topk(logits, count, 8, start)
    assert got[0].tolist() == list(range(12, 20)) and got[1].tolist() == list(range(8))
    assert got[2].tolist() == [-1] * 8 and torch.equal(got[3], got[0])
    none = select_topk(logits[:, :0], count.clamp(max=8), 8)
    assert none[0].tolist() == list(range(8))


def test_cells_are_places_of_positions(device: str) -> None:
    g = torch.Generator().manual_seed(3)
    size, topk = 8, 12
    logits = torch.randn(6, 40, generator=g)
    count = torch.tensor([40, 12, 5, 0, 33, 13])
    table = torch.randperm(15, generator=g).to(torch.int32).view(3, 5)
    row = torch.tensor([0, 2, 1, 0, 2, 1])
    wanted = [
        [
            int(table[r, p // size]) * size + p % size if p >= 0 else -1
            for p in chosen(logits[t, : int(count[t])].tolist(), topk)
        ]
        for t, r in enumerate(row.tolist())
    ]
    paged: dict[str, Any] = {"page_table": table, "row": row, "page_size": size}
    paged = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in paged.items()}
    for name in [name for name in runnable_on(select_topk, device) if name != "triton"]:
        call = select_topk.using(name)
        assert call(logits.to(device), count.to(device), topk, **paged).tolist() == wanted, name


def test_a_million_columns(device: str) -> None:
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 1 << 20, generator=g)
    count = torch.tensor([(1 << 20) - 3], dtype=torch.int32, device=device)
    wanted = logits[0, : int(count)].topk(2048).indices.sort().values
    assert torch.equal(select_topk(logits.to(device), count, 2048)[0].cpu(), wanted.int())


def test_blocks_of_tokens_do_not_show() -> None:
    g = torch.Generator().manual_seed(5)
    logits = torch.randint(-9, 9, (40, L), generator=g).float()
    count = torch.randint(0, L - 8, (40,), generator=g)
    for start in (None, torch.randint(0, 9, (40,), generator=g)):
        wanted = select_topk(logits, count, 17, start)
        for size in (1, 50_000):
            with ATTENTION_TUNING.replaced(paging_block_bytes=size):
                for call in (select_topk, select_topk.reference):
                    assert torch.equal(call(logits, count, 17, start), wanted)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"topk": 0}, "`topk` is 0, not 1 to 4096"),
        ({"topk": 4097}, "`topk` is 4097"),
        ({"page_size": 0}, "`page_size` is 0, not 1 or more"),
        ({"row": None}, "`row` is NoneType None, not a tensor"),
        ({"page_table": None}, "`page_table` is None, but `row` or `page_size` is given"),
        ({"row": torch.tensor([0, 3])}, "`row` holds 3, not numbers from 0 to 2"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], said: str) -> None:
    given = {
        "logits": torch.zeros(2, 9),
        "count": torch.tensor([9, 3]),
        "topk": 4,
        "page_table": torch.zeros(3, 2, dtype=torch.int32),
        "row": torch.tensor([0, 2]),
        "page_size": 8,
    }
    with pytest.raises(BadArgument, match=said):
        select_topk(**{**given, **change})
