"""Selection of the top pages from given scores, for many tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.landmark.kernels.choose import choose_best_kernel

pytestmark = pytest.mark.skipif(
    not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA"
)
PAGES, BLOCK, TOPK, K, FEW = 512, 16, 6, 8, 32
LEVELS = 2
"""All 32 blocks are searched, or 16."""
UNTOUCHED = -7


def chosen(score: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Pages and scores that the kernel selects from scores [T, PAGES]."""
    lines = score.clone()
    for line, count in zip(lines, counts, strict=True):
        line[count:] = math.nan
    tops = torch.where(lines.isnan(), -math.inf, lines).view(-1, PAGES // BLOCK, BLOCK).amax(2)
    slot = torch.tensor(counts)
    # Extra memory after the last list, which must not be written.
    listed = torch.full((len(counts) + 40, FEW), UNTOUCHED, dtype=torch.int32)
    values = torch.full(listed.shape, float(UNTOUCHED))
    indices = torch.full((len(counts) + 1, TOPK), UNTOUCHED, dtype=torch.int32)
    scores = torch.full(indices.shape, float(UNTOUCHED))
    choose_best_kernel[(1, len(counts))](
        *(lines, tops, slot, listed, values, indices, scores),
        *(0, 1, PAGES, PAGES // BLOCK, TOPK, 1, K, K, PAGES // BLOCK, BLOCK, LEVELS, FEW, True),
        num_warps=1,
    )
    for memory in (listed[len(counts) :], values[len(counts) :], indices[-1:], scores[-1:]):
        assert bool((memory == UNTOUCHED).all())
    return indices[:-1], scores[:-1]


def check(score: Tensor, counts: list[int]) -> None:
    indices, scores = chosen(score, counts)
    for line, count, pages, values in zip(score, counts, indices, scores, strict=True):
        order = line[:count].sort(descending=True, stable=True).indices[:TOPK].sort().values
        none = TOPK - len(order)
        assert pages.tolist() == order.tolist() + [-1] * none
        assert values.tolist() == line[order].tolist() + [-math.inf] * none


@pytest.mark.parametrize("seed", range(3))
def test_few_candidates_and_many(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    counts = [0, 1, 5, 6, 7, 100, 127, 128, 129, 200, 511, 512]
    check(torch.randn(len(counts), PAGES, generator=g), counts)


@pytest.mark.parametrize("alike", [2, 3, 5, 40])
def test_ties_at_the_bound_and_more_than_there_is_room_to_list(alike: int) -> None:
    g = torch.Generator().manual_seed(alike)
    score = torch.randint(0, alike, (8, PAGES), generator=g).float()
    check(score, [PAGES, 500, 400, 300, 200, 150, 140, 133])


def test_the_best_lie_side_by_side() -> None:
    score = torch.arange(PAGES).float().expand(2, -1).contiguous()
    check(torch.stack([score[0], -score[1]]), [PAGES, PAGES - 3])


def test_equal_and_infinite_scores() -> None:
    score = torch.zeros(3, PAGES)
    score[1] = -math.inf
    score[2, 300:] = math.inf
    check(score, [PAGES] * 3)
