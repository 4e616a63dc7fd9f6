"""Weighted sum of the expert rows of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.moe import rows_launch
from cairn.ops.registry import op

NAME = "apply_shuffle_mul_sum"


@op(mutates=("output",))
def apply_shuffle_mul_sum(
    input: Tensor, output: Tensor, permutation: Tensor, factors: Tensor | None
) -> None:
    """output[t] = sum over j < k of factors[t * k + j] * input[permutation[t * k + j]], in float32,
    rounded once.

    Args:
        input: [rows, H] float32, bfloat16 or float16.
        output: [T, H] of its dtype, written.
        permutation: [T * k] int32 or int64.
        factors: [T * k], or another shape with as many elements, float32 or input's dtype; None: 1.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for rows out of range.
    """
    taken = input[permutation.long()].float()
    if factors is not None:
        taken = taken * factors.float().reshape(-1, 1)
    if output.numel():
        output.copy_(taken.view(output.shape[0], -1, output.shape[1]).sum(dim=1))


@apply_shuffle_mul_sum.check
def _(call: Call) -> None:
    expect(NAME, "input", call.input, 2, FLOATS)
    expect(
        NAME, "output", call.output, (None, call.input.shape[1]), (call.input.dtype,), call.input
    )
    expect(NAME, "permutation", call.permutation, 1, INDICES, call.input)
    count, tokens = call.permutation.shape[0], call.output.shape[0]
    if count % tokens if tokens else count:
        refuse(NAME, "permutation", f"has {count} rows, which {tokens} tokens do not share alike")
    expect_within(NAME, "permutation", call.permutation, call.input.shape[0])
    if call.factors is not None:
        expect(
            NAME, "factors", call.factors, dtypes=(torch.float32, call.input.dtype), like=call.input
        )
        if call.factors.numel() != count:
            refuse(NAME, "factors", f"has shape {list(call.factors.shape)}, not {count} numbers")


def _topk(call: Call) -> int:
    return int(call.permutation.shape[0] // max(1, call.output.shape[0]))


@apply_shuffle_mul_sum.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.input.stride(1) == 1
        and rows_launch.adds(call.output, _topk(call), call.permutation, call.factors)
    ),
    replayed=True,
)
def _(call: Call) -> None:
    given = {"rows": call.permutation, "weights": call.factors}
    rows_launch.sum_rows(call.input, call.output, _topk(call), **given)
