"""Grouped products of e4m3 rows with 4-bit weights, under sgl-kernel's names."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.moe.prepare_moe_input import WRITTEN, prepare_moe_input
from cairn.ops.moe.sorted_rows import owners, products
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op

GROUP = 128
TOGETHER = 4
"""Number of groups whose scales are interleaved, if the number of groups is a multiple of it."""


@op(mutates=WRITTEN[:-1])
def get_cutlass_w4a8_moe_mm_data(
    topk_ids: Tensor,
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    input_permutation: Tensor,
    output_permutation: Tensor,
    num_experts: int,
    n: int,
    k: int,
) -> None:
    """`prepare_moe_input` with problem sizes for products whose left operand is the weight: (2n,
    rows, k) and (k, rows, n).

    Args:
        topk_ids, expert_offsets, input_permutation, output_permutation, num_experts, n, k: as in
            `prepare_moe_input`.
        problem_sizes1, problem_sizes2: [num_experts, 3] int32, written.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    prepare_moe_input.reference(
        topk_ids,
        expert_offsets,
        problem_sizes1,
        problem_sizes2,
        input_permutation,
        output_permutation,
        num_experts,
        n,
        k,
    )
    for sizes in (problem_sizes1, problem_sizes2):
        sizes.copy_(torch.stack((sizes[:, 1], sizes[:, 0], sizes[:, 2]), dim=1))


@op(mutates=("d",))
def cutlass_w4a8_moe_mm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    experts_offsets: Tensor,
    problem_sizes: Tensor,
    a_strides: Tensor | None,
    b_strides: Tensor | None,
    d_strides: Tensor | None,
    s_strides: Tensor | None,
    chunk_size: int = 128,
    topk: int = 8,
) -> None:
    """d[o : o + m] = a[o : o + m] @ w[e].T * a_scales for each expert e, in float32, rounded once,
    o = experts_offsets[e] and m = problem_sizes[e, 1]. Rows of no expert are not changed.

    Args:
        d: [R, N] float32, bfloat16 or float16, written.
        a: [R, K] float8_e4m3fn, K a multiple of 128.
        b: [E, N, K / 2] int8: pairs of signed 4-bit integers, the first in the low nibble.
        a_scales: one float32.
        b_scales: [E, G / s, N * s] float32, bfloat16 or float16, of G = K / 128 groups, s = 4 if G
            is a multiple of 4, else 1: the scale of group g of row n is at [g // s, n * s + g % s].
        experts_offsets: [E] int32, or [E + 1].
        problem_sizes: [E, 3] int32: (n, m, k) of each expert; only m is read.
        a_strides, b_strides, d_strides, s_strides, topk: ignored; strides may be None.
        chunk_size: group size, 128.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x, (outputs, half) = a.float(), b.shape[1:]
    groups = 2 * half // GROUP
    scales = (
        b_scales.float().unflatten(2, (outputs, -1)).transpose(1, 2).reshape(-1, outputs, groups)
    )

    def matrix(expert: int) -> Tensor:
        pairs = b[expert].int()
        # The low nibble and the high nibble, sign-extended.
        both = torch.stack(((pairs << 28) >> 28, pairs >> 4), dim=-1).flatten(1)
        factor = scales[expert].repeat_interleave(GROUP, dim=1) * a_scales.reshape(())
        return (both.float() * factor).t()

    owner = owners(experts_offsets, problem_sizes[:, 1], a.shape[0])
    d.copy_(products(d, x, owner, matrix, b.shape[0]))


@get_cutlass_w4a8_moe_mm_data.check
def _(call: Call) -> None:
    check = prepare_moe_input._check
    assert check is not None
    check(
        prepare_moe_input.bind(
            call.topk_ids,
            call.expert_offsets,
            call.problem_sizes1,
            call.problem_sizes2,
            call.input_permutation,
            call.output_permutation,
            call.num_experts,
            call.n,
            call.k,
        )
    )


@cutlass_w4a8_moe_mm.check
def _(call: Call) -> None:
    name, d = "cutlass_w4a8_moe_mm", call.d
    expect(name, "d", d, 2, FLOATS)
    rows, outputs = d.shape
    expect(name, "a", call.a, (rows, None), (E4M3,), d)
    width = call.a.shape[1]
    if call.chunk_size != GROUP:
        refuse(name, "chunk_size", f"is {call.chunk_size}, not {GROUP}")
    if not width or width % GROUP:
        refuse(name, "a", f"has {width} columns, not a multiple of {GROUP}")
    expect(name, "b", call.b, (None, outputs, width // 2), (torch.int8,), d)
    experts, groups = call.b.shape[0], width // GROUP
    expect(name, "a_scales", call.a_scales, dtypes=(torch.float32,), like=d)
    if call.a_scales.numel() != 1:
        refuse(name, "a_scales", f"has shape {list(call.a_scales.shape)}, not one number")
    together = TOGETHER if groups % TOGETHER == 0 else 1
    shape = (experts, groups // together, outputs * together)
    expect(name, "b_scales", call.b_scales, shape, FLOATS, d)
    expect(name, "problem_sizes", call.problem_sizes, (experts, 3), INT32, d)
    expect(name, "experts_offsets", call.experts_offsets, 1, INT32, d)
    if call.experts_offsets.shape[0] != experts:
        expect(name, "experts_offsets", call.experts_offsets, (experts + 1,), INT32, d)
