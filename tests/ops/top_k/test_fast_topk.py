"""Top-k selections against sorting row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import (
    fast_topk,
    fast_topk_transform_fused,
    fast_topk_transform_ragged_fused,
    fast_topk_v2,
)
from cairn.ops.select_k.tuning import TUNING as SELECT_K_TUNING
from tests.ops.sampling.variants import runnable_on
from tests.ops.tables import Tuned


def chosen(score: list[float], topk: int) -> list[int]:
    """Ascending positions of the k largest scores; ties go to the lower position."""

    def key(position: int) -> tuple[float, int]:
        value = score[position]
        return (math.inf if math.isnan(value) else -value, position)

    return sorted(sorted(range(len(score)), key=key)[:topk])


def expected(score: Tensor, lengths: Tensor, topk: int, starts: Tensor | None) -> list[list[int]]:
    rows = []
    for b, n in enumerate(lengths.tolist()):
        start = 0 if starts is None else int(starts[b])
        best = list(range(n)) if n <= topk else chosen(score[b, start : start + n].tolist(), topk)
        rows.append(best + [-1] * (topk - len(best)))
    return rows


def on(device: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("topk", [1, 7, 63, 100])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["random", "ties", "constant", "pairs", "wild"])
def test_against_sorting(kind: str, whole: bool, topk: int, device: str) -> None:
    g = torch.Generator().manual_seed(topk)
    score = torch.randn(6, 1000, generator=g)
    if kind == "ties":
        score = torch.randint(-3, 4, (6, 1000), generator=g).float()
    elif kind == "constant":
        score = torch.zeros(6, 1000)
    elif kind == "pairs":
        # With NaN first, the last selected position may be the one without ties.
        score = (torch.randperm(1000, generator=g) // 2).float().repeat(6, 1)
        score[:, 70] = math.nan
    elif kind == "wild":
        # Few positive scores: the last selected ones are zeros or negative.
        rare = torch.tensor([math.nan, -math.inf, -0.0, 0.0, math.inf, 1e-45])
        often = torch.tensor([8.0, 8.0, 1.0, 1.0, 0.1, 0.1]).expand(6, -1)
        score = rare[torch.multinomial(often, 1000, replacement=True, generator=g)]
    lengths = torch.tensor([0, topk, topk + 1, 500, 999, 63], dtype=torch.int32)
    starts = torch.tensor([1000, 3, 5, 500, 1, 0], dtype=torch.int32)
    given = [score, lengths, starts]
    if whole:
        given = [score, torch.full((6,), 1000, dtype=torch.int32)]
    wanted = expected(given[0], given[1], topk, None if whole else starts)
    values, counts, *begin = on(device, *given)
    for name in runnable_on(fast_topk_v2, device):
        got = fast_topk_v2.using(name)(values, counts, topk, *begin)
        assert got.dtype == torch.int32
        assert got.tolist() == wanted, name


def test_long_rows_pass_several_levels(device: str) -> None:
    g = torch.Generator().manual_seed(0)
    # Smaller than any poison in uninitialised memory.
    score = torch.randint(0, 200, (2, 41000), generator=g).float() * 1e30 - 1e36
    lengths = torch.tensor([41000, 20000], dtype=torch.int32)
    wanted = expected(score, lengths, 3000, None)
    given = on(device, score, lengths)
    for name in runnable_on(fast_topk_v2, device):
        assert fast_topk_v2.using(name)(*given, 3000).tolist() == wanted, name


KINDS = ["random", "ties", "constant", "few", "run", "ascending"]
WRONG = {"too high": -2.0, "too low": 100.0}
"""Bounds that a sample may give; random rows test them too and are fast."""


@pytest.mark.parametrize(
    ("kind", "sure"),
    [
        *(pytest.param(kind, SELECT_K_TUNING.sure, id=f"{kind}-sure") for kind in KINDS),
        *(pytest.param("random", sure, id=f"random-{name}") for name, sure in WRONG.items()),
        *(
            pytest.param(kind, sure, id=f"{kind}-{name}", marks=pytest.mark.slow)
            for kind in KINDS[1:]
            for name, sure in WRONG.items()
        ),
    ],
)
def test_long_rows_whatever_their_sample_says(
    kind: str, sure: float, device: str, tuned: Tuned
) -> None:
    tuned(SELECT_K_TUNING, sure=sure)
    g = torch.Generator().manual_seed(3)
    score = torch.randn(3, 9000, generator=g)
    if kind == "ties":
        score = (3 * score).round()
    elif kind == "constant":
        score = torch.full((3, 9000), -math.inf)
        score[1] = math.nan
    elif kind == "few":
        # Fewer than k scores above the bound, before and after ties.
        score = (score - 2.5).relu()
    elif kind == "run":
        score[:, 3000:4500] += 5
    elif kind == "ascending":
        score = score.sort(dim=1).values
    lengths = torch.tensor([9000, 4097, 8000], dtype=torch.int32)
    starts = torch.tensor([0, 4000, -50], dtype=torch.int32)
    given = on(device, score, lengths, starts)
    for topk in (100, 2048):
        wanted = expected(score, lengths, topk, torch.tensor([0, 4000, 0]))
        wanted[2] = [p + 50 for p in chosen(score[2, :7950].tolist(), topk)]
        for name in runnable_on(fast_topk_v2, device):
            got = fast_topk_v2.using(name)(given[0], given[1], topk, given[2])
            assert got.tolist() == wanted, (name, topk)


def test_rows_with_fewer_candidates_are_padded(device: str) -> None:
    score, lengths = on(device, torch.randn(2, 20), torch.tensor([30, 25], dtype=torch.int32))
    starts = torch.tensor([0, 15], dtype=torch.int32, device=device)
    for name in runnable_on(fast_topk_v2, device):
        got = fast_topk_v2.using(name)(score, lengths, 24, starts).tolist()
        assert got == [[*range(20), *[-1] * 4], [*range(5), *[-1] * 19]], name


@pytest.mark.parametrize("width", [100, 20_000])
def test_candidates_that_lie_outside_of_the_row(width: int, device: str) -> None:
    far = torch.iinfo(torch.int32)
    score = torch.arange(float(width), device=device).expand(6, -1)
    starts = torch.tensor([-30, -width, -width - 1, 3, width - 2, far.min], dtype=torch.int32)
    lengths = torch.tensor([width + 30, width + 5, far.max, far.max, far.max, far.max]).int()
    wanted = [
        [*range(width + 25, width + 30)],
        [*range(width, width + 5)],
        [*range(2 * width - 4, 2 * width + 1)],
        [*range(width - 8, width - 3)],
        [0, 1, -1, -1, -1],
        [-1] * 5,
    ]
    given = on(device, lengths, starts)
    for name in runnable_on(fast_topk_v2, device):
        assert fast_topk_v2.using(name)(score, given[0], 5, given[1]).tolist() == wanted, name
        empty = fast_topk_v2.using(name)(score[:, :0], given[0], 5, given[1])
        assert empty.tolist() == [[-1] * 5] * 6, name


def test_short_rows_are_not_read() -> None:
    score = torch.full((2, 50), torch.nan)
    got = fast_topk_v2(score, torch.tensor([3, 4], dtype=torch.int32), 4)
    assert got.tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]


@pytest.mark.parametrize("page_size", [1, 4])
def test_places_come_from_the_page_table(page_size: int, device: str) -> None:
    g = torch.Generator().manual_seed(page_size)
    score = torch.randn(5, 90, generator=g)
    lengths = torch.tensor([90, 2, 33, 60, 7], dtype=torch.int32)
    table = torch.randperm(300, generator=g).to(torch.int32).view(3, 100)
    bounds = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    request = [0, 2, 2, 2, None]
    positions = expected(score, lengths, 8, None)
    wanted = [
        [
            -1 if p < 0 or q is None else int(table[q, p // page_size]) * page_size + p % page_size
            for p in row
        ]
        for q, row in zip(request, positions, strict=True)
    ]
    given = on(device, score, lengths, table, bounds)
    for name in runnable_on(fast_topk_transform_fused, device):
        call = fast_topk_transform_fused.using(name)
        assert call(*given, 8, page_size=page_size).tolist() == wanted, name


def test_offsets_are_added_and_padding_stays(device: str) -> None:
    score = torch.randn(3, 40)
    lengths = torch.tensor([40, 3, 0], dtype=torch.int32)
    offset = torch.tensor([1000, 50, 7], dtype=torch.int32)
    wanted = [
        [-1 if p < 0 else p + o for p in row]
        for row, o in zip(expected(score, lengths, 5, None), offset.tolist(), strict=True)
    ]
    given = on(device, score, lengths, offset)
    for name in runnable_on(fast_topk_transform_ragged_fused, device):
        assert fast_topk_transform_ragged_fused.using(name)(*given, 5).tolist() == wanted, name


def test_fast_topk_along_any_dim() -> None:
    x = torch.randn(4, 9, 5)
    for topk in (1, 3):
        values, indices = fast_topk(x, topk, 1)
        ordered = x.sort(dim=1, descending=True)
        assert torch.equal(values, ordered.values[:, :topk])
        assert torch.equal(indices, ordered.indices[:, :topk])


@pytest.mark.parametrize("kind", ["random", "ties", "constant", "wild"])
@pytest.mark.parametrize("width", [1, 63, 700, 4096, 5000])
def test_the_first_of_the_largest_numbers(width: int, kind: str, device: str) -> None:
    g = torch.Generator().manual_seed(width)
    x = torch.randn(3, width, generator=g)
    if kind == "ties":
        x = torch.randint(-3, 4, (3, width), generator=g).float()
    elif kind == "constant":
        x = torch.full((3, width), -math.inf)
    elif kind == "wild":
        rare = torch.tensor([math.nan, -math.inf, -0.0, 0.0, math.inf])
        x = rare[torch.randint(5, (3, width), generator=g)]
        x[0] = torch.where(x[0] == 0, x[0], -0.0)
        x[1] = x[1].nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    for dtype in (torch.float32, torch.bfloat16):
        # Sorted on the CPU: a GPU sorts negative NaN of bfloat16 last.
        ordered = x.to(dtype).sort(dim=1, descending=True, stable=True)
        given = x.to(device, dtype)
        for topk in (1, min(4, width)):
            for name in runnable_on(fast_topk, device)[1:]:
                values, indices = fast_topk.using(name)(given, topk, 1)
                assert torch.equal(indices.cpu(), ordered.indices[:, :topk]), (name, dtype, topk)
                torch.testing.assert_close(
                    values.cpu(), ordered.values[:, :topk], rtol=0, atol=0, equal_nan=True
                )


SCORE, LENGTHS = torch.zeros(2, 10), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    "argument, given",
    [
        ("score", (SCORE.half(), LENGTHS, 4)),
        ("score", (SCORE[0], LENGTHS, 4)),
        ("lengths", (SCORE, LENGTHS.long(), 4)),
        ("lengths", (SCORE, LENGTHS[:1], 4)),
        ("lengths", (SCORE, LENGTHS.to("meta"), 4)),
        ("topk", (SCORE, LENGTHS, 0)),
        ("topk", (SCORE, LENGTHS, 5000)),
        ("row_starts", (SCORE, LENGTHS, 4, LENGTHS.float())),
    ],
)
def test_refuses(argument: str, given: tuple) -> None:
    with pytest.raises(BadArgument, match=f"`{argument}`"):
        fast_topk_v2(*given)


def test_refuses_other_arguments() -> None:
    with pytest.raises(BadArgument, match="`cu_seqlens_q`"):
        fast_topk_transform_fused(SCORE, LENGTHS, LENGTHS.view(1, 2), LENGTHS[:1], 4)
    with pytest.raises(BadArgument, match="`page_table_size_1`"):
        fast_topk_transform_fused(SCORE, LENGTHS, LENGTHS, LENGTHS, 4)
    with pytest.raises(BadArgument, match="`topk_indices_offset`"):
        fast_topk_transform_ragged_fused(SCORE, LENGTHS, LENGTHS[:1], 4)
    with pytest.raises(BadArgument, match="`topk`"):
        fast_topk(SCORE, 11, 1)
    with pytest.raises(BadArgument, match="`dim`"):
        fast_topk(SCORE, 1, 2)
