"""Permutations and problem sizes of grouped products."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, INT32, check_min, expect
from cairn.ops.moe import align_launch
from cairn.ops.moe.align_launch import SCALES
from cairn.ops.registry import op

NAME = "prepare_moe_input"
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
    """Assign a row to every pair t * topk + j of topk_ids, sorted by expert (stable). Pairs with an
    id out of range get no row.

    Args:
        topk_ids: [T, topk] int32 or int64.
        expert_offsets: [num_experts + 1] int32, written: first row of each expert, and the end.
        problem_sizes1: [num_experts, 3] int32, written: (rows, 2n, k) of each expert.
        problem_sizes2: [num_experts, 3] int32, written: (rows, k, n).
        input_permutation: [T * topk] int32, written: the token of each row; those after the last
            row are not changed.
        output_permutation: [T * topk] int32, written: the row of each pair; entries of pairs
            without a row are not changed.
        num_experts: number of experts.
        n, k: intermediate size and hidden size.
        blockscale_offsets: [num_experts + 1] int32, written: expert_offsets with the rows of each
            expert padded to a multiple of 128; or None.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    flat = topk_ids.flatten().long()
    known = (flat >= 0) & (flat < num_experts)
    pair = known.nonzero()[:, 0]
    pair = pair[flat[pair].argsort(stable=True)]
    rows = torch.arange(pair.numel(), device=flat.device)
    input_permutation[: pair.numel()] = pair.div(topk_ids.shape[1], rounding_mode="floor").int()
    output_permutation[pair] = rows.int()
    count = torch.bincount(flat[pair], minlength=num_experts)
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
def _(call: Call) -> None:
    expect(NAME, "topk_ids", call.topk_ids, 2, INDICES)
    for name, number in (("num_experts", call.num_experts), ("n", call.n), ("k", call.k)):
        check_min(NAME, name, number, 1)
    pairs, ends = (call.topk_ids.numel(),), (call.num_experts + 1,)
    expect(NAME, "expert_offsets", call.expert_offsets, ends, INT32, call.topk_ids)
    expect(NAME, "problem_sizes1", call.problem_sizes1, (call.num_experts, 3), INT32, call.topk_ids)
    expect(NAME, "problem_sizes2", call.problem_sizes2, (call.num_experts, 3), INT32, call.topk_ids)
    expect(NAME, "input_permutation", call.input_permutation, pairs, INT32, call.topk_ids)
    expect(NAME, "output_permutation", call.output_permutation, pairs, INT32, call.topk_ids)
    if call.blockscale_offsets is not None:
        expect(NAME, "blockscale_offsets", call.blockscale_offsets, ends, INT32, call.topk_ids)


@prepare_moe_input.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: align_launch.accepts(
        call.topk_ids,
        call.num_experts,
        call.expert_offsets,
        call.problem_sizes1,
        call.problem_sizes2,
        call.input_permutation,
        call.output_permutation,
        call.blockscale_offsets,
    ),
    replayed=True,
)
def _(call: Call) -> None:
    into = align_launch.Sorted(
        call.input_permutation,
        call.expert_offsets,
        inverse=call.output_permutation,
        sizes=(call.problem_sizes1, call.problem_sizes2, call.n, call.k),
        scale_begins=call.blockscale_offsets,
    )
    share = max(1, call.topk_ids.shape[1])
    align_launch.sort(call.topk_ids, call.num_experts, into, share=share)
