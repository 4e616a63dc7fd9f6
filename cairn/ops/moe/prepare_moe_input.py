"""Where rows of tokens go when they are gathered by expert, and what each expert multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import INDICES, INT32, check_least, expect
from cairn.ops.moe import routing
from cairn.ops.registry import op
from cairn.ops.testing import Arguments, Cases, Make

NAME = "prepare_moe_input"
SCALES = 128
"""Rows that an expert's block scales begin at a multiple of."""
WRITTEN = (
    *("expert_offsets", "problem_sizes1", "problem_sizes2", "input_permutation"),
    *("output_permutation", "blockscale_offsets"),
)


@op(mutates=WRITTEN)
def prepare_moe_input(
    topk_ids: Tensor,
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    input_permutation: Tensor,
    output_permutation: Tensor,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: Tensor | None = None,
) -> None:
    """Give every flat place t * topk + j of topk_ids a row, expert after expert, in their order
    within an expert. Ids that are no expert's take no row.

    Args:
        topk_ids: [T, topk] int32 or int64.
        expert_offsets: [num_experts + 1] int32, written: first row of each expert, and the end.
        problem_sizes1: [num_experts, 3] int32, written: (rows, 2n, k) of each expert.
        problem_sizes2: [num_experts, 3] int32, written: (rows, k, n).
        input_permutation: [T * topk] int32, written: the token of each row; those behind the last
            row are left as they are.
        output_permutation: [T * topk] int32, written: the row of each place; places without one are
            left as they are.
        num_experts: E.
        n, k: widths between the two products, and of a token.
        blockscale_offsets: [num_experts + 1] int32, written: the same as expert_offsets if each
            expert had a multiple of 128 rows; or None.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    flat = topk_ids.flatten().long()
    known = (flat >= 0) & (flat < num_experts)
    place = known.nonzero()[:, 0]
    place = place[flat[place].argsort(stable=True)]
    rows = torch.arange(place.numel(), device=flat.device)
    input_permutation[: place.numel()] = place.div(topk_ids.shape[1], rounding_mode="floor").int()
    output_permutation[place] = rows.int()
    count = torch.bincount(flat[place], minlength=num_experts)
    for sizes, others in ((problem_sizes1, (2 * n, k)), (problem_sizes2, (k, n))):
        sizes[:, 0] = count
        sizes[:, 1], sizes[:, 2] = others
    _offsets(count, expert_offsets)
    if blockscale_offsets is not None:
        whole = (count + SCALES - 1).div(SCALES, rounding_mode="floor") * SCALES
        _offsets(whole, blockscale_offsets)


def _offsets(count: Tensor, out: Tensor) -> None:
    out[0] = 0
    out[1:] = count.cumsum(0)


@prepare_moe_input.check
def _(
    topk_ids: Tensor,
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    input_permutation: Tensor,
    output_permutation: Tensor,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: Tensor | None = None,
) -> None:
    expect(NAME, "topk_ids", topk_ids, 2, INDICES)
    for name, number in (("num_experts", num_experts), ("n", n), ("k", k)):
        check_least(NAME, name, number, 1)
    places, ends = (topk_ids.numel(),), (num_experts + 1,)
    expect(NAME, "expert_offsets", expert_offsets, ends, INT32, topk_ids)
    expect(NAME, "problem_sizes1", problem_sizes1, (num_experts, 3), INT32, topk_ids)
    expect(NAME, "problem_sizes2", problem_sizes2, (num_experts, 3), INT32, topk_ids)
    expect(NAME, "input_permutation", input_permutation, places, INT32, topk_ids)
    expect(NAME, "output_permutation", output_permutation, places, INT32, topk_ids)
    if blockscale_offsets is not None:
        expect(NAME, "blockscale_offsets", blockscale_offsets, ends, INT32, topk_ids)


def _given(make: Make, ids: Tensor, experts: int, scales: bool) -> Arguments:
    def words(*shape: int) -> Tensor:
        return make.empty(*shape, dtype=torch.int32)

    return make.args(
        *(ids, words(experts + 1), words(experts, 3), words(experts, 3)),
        *(words(ids.numel()), words(ids.numel()), experts, 96, 64),
        words(experts + 1) if scales else None,
    )


@prepare_moe_input.cases
def _(make: Make) -> Cases:
    yield _given(make, make.randint(0, 8, 13, 3, dtype=torch.int32), 8, True)
    yield _given(make, make.randint(-1, 6, 200, 2), 5, False)
    yield _given(make, make.randint(0, 4, 0, 2), 4, True)


@prepare_moe_input.bench
def _(draw: Draw) -> Points:
    for tokens, experts, topk in routing.routers_of(draw):
        ids = draw.randint(0, experts, tokens, topk, dtype=torch.int32)
        given = _given(draw, ids, experts, True)
        yield Point(f"{tokens}: {topk} of {experts}", given, moved(*given.args[:6]))
