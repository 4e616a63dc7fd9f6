"""Test rows and benchmark points of this family's ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved, short
from cairn.ops.testing import Make
from cairn.ops.top_k.selection import Rows

SHAPES = {
    "full": ((1, 2048), (1, 1 << 17), (4, 1 << 17), (64, 1 << 13), (64, 1 << 15), (64, 1 << 17)),
    "tiny": ((2, 500),),
}
"""(rows, scores per row), as in a decode step."""


def rows_of(make: Make) -> Iterator[Rows]:
    """Short and long rows, with ties, infinities, NaN, and NaN outside of the candidates."""
    score = make.randn(5, 100)
    lengths = make.tensor([0, 1, 7, 63, 90], dtype=torch.int32)
    starts = make.tensor([0, 99, 93, 20, 10], dtype=torch.int32)
    column = torch.arange(100, device=score.device)
    score[(column < starts[:, None]) | (column >= (starts + lengths)[:, None])] = torch.nan
    yield Rows(score, lengths, starts, 7)
    yield Rows(make.randint(-2, 3, 5, 100).float() * 0.0, lengths, starts, 10)
    yield Rows(make.randint(-3, 4, 5, 200).float()[:, ::2], lengths, starts, 33)
    yield Rows(score[:0], lengths[:0], starts[:0], 7)
    rare = make.tensor([float("nan"), -torch.inf, torch.inf, -0.0, 0.0, 3.4e38, -3.4e38, 1e-45])
    wild = rare[make.randint(0, 8, 5, 150)][:, :100]
    yield Rows(wild, lengths, starts, 40)
    long = make.tensor([2500, 1100, 40], dtype=torch.int32)
    offset = make.tensor([100, 1033, 2000], dtype=torch.int32)
    yield Rows(make.randint(-50, 51, 3, 2600).float(), long, offset, 100)
    yield Rows(make.randn(3, 2600).sort(dim=1).values, long, offset, 1000)


def points(
    draw: Draw,
    alternative: Callable[..., Any],
    *arguments: Callable[[int, int], Tensor],
    k: int = 2048,
) -> Points:
    """Full rows of every shape.

    Args:
        alternative: the implementation by torch's operators to compare with.
        arguments: functions (rows, width) that build the arguments between `lengths` and `topk`.
    """
    tiny = len(draw.layers) == 1
    for rows, width in SHAPES["tiny" if tiny else "full"]:
        score = draw.randn(rows, width, dtype=torch.float32)
        lengths = torch.full((rows,), width, dtype=torch.int32, device=score.device)
        topk = min(k, width // 4)
        between = [build(rows, width) for build in arguments]
        yield Point(
            f"{topk} of {rows} x {short(width)}",
            draw.args(score, lengths, *between, topk),
            moved(score) + 4 * rows * topk,
            alternatives=(Alternative("topk", alternative),),
        )
