"""Argument checks that the products share."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.norm.launch import check_weight


def check_product(
    op: str,
    input: Tensor,
    name: str,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
) -> None:
    """Raise BadArgument unless shapes, dtypes and devices of a product are consistent.

    Args:
        op: name of the op, for messages.
        input: [..., K] float32, bfloat16 or float16.
        name: name of the weight argument, for messages.
        weight: [N, K], input's dtype.
        bias: [N], input's dtype, dense; or None.
        norm: [K], input's dtype or float32, dense; or None.
    """
    if input.dim() == 0:
        refuse(op, "input", "has shape [], not [..., K]")
    expect(op, "input", input, None, FLOATS)
    dtype, width = input.dtype, input.shape[-1]
    expect(op, name, weight, 2, (dtype,), input)
    outputs, own = weight.shape
    if own != width:
        refuse(op, name, f"has shape {list(weight.shape)}, not [any, {width}]")
    if bias is not None:
        expect(op, "bias", bias, (outputs,), (dtype,), input, 1)
    if norm is not None:
        check_weight(op, "norm", norm, input)
