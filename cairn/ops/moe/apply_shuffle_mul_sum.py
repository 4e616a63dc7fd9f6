"""Rows of experts back to their tokens, weighted and added."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.moe import routing
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

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
        factors: [T * k], or of that many numbers, float32 or input's dtype; None: 1.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for rows that there are not.
    """
    taken = input[permutation.long()].float()
    if factors is not None:
        taken = taken * factors.float().reshape(-1, 1)
    if output.numel():
        output.copy_(taken.view(output.shape[0], -1, output.shape[1]).sum(dim=1))


@apply_shuffle_mul_sum.check
def _(input: Tensor, output: Tensor, permutation: Tensor, factors: Tensor | None) -> None:
    expect(NAME, "input", input, 2, FLOATS)
    expect(NAME, "output", output, (None, input.shape[1]), (input.dtype,), input)
    expect(NAME, "permutation", permutation, 1, INDICES, input)
    count, tokens = permutation.shape[0], output.shape[0]
    if count % tokens if tokens else count:
        refuse(NAME, "permutation", f"has {count} rows, which {tokens} tokens do not share alike")
    expect_within(NAME, "permutation", permutation, input.shape[0])
    if factors is not None:
        expect(NAME, "factors", factors, dtypes=(torch.float32, input.dtype), like=input)
        if factors.numel() != count:
            refuse(NAME, "factors", f"has shape {list(factors.shape)}, not {count} numbers")


@apply_shuffle_mul_sum.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        x, out = make.randn(15, 24, dtype=dtype), make.empty(5, 24, dtype=dtype)
        order = make.randint(0, 15, 15, dtype=torch.int32)
        yield make.args(x, out, order, make.randn(15, dtype=dtype))
        yield make.args(x, out, order, None)
    yield make.args(make.randn(6, 8), make.empty(3, 8), make.randint(0, 6, 6), make.randn(3, 2))
    yield make.args(make.randn(0, 8), make.empty(0, 8), make.randint(0, 1, 0), None)


@apply_shuffle_mul_sum.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routing.routers_of(draw):
        x, out = draw.randn(tokens * topk, routing.WIDTH), draw.randn(tokens, routing.WIDTH)
        order, factors = draw.rand(tokens * topk).argsort(), draw.randn(tokens * topk)
        yield Point(f"{tokens} x {topk}", draw.args(x, out, order, factors), moved(x, out, order))
