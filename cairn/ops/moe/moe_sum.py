"""Sums of the expert outputs of a token."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect
from cairn.ops.moe import rows_launch
from cairn.ops.registry import op


@op(mutates=("output_tensor",))
def moe_sum(input_tensor: Tensor, output_tensor: Tensor) -> None:
    """output_tensor becomes the sum of input_tensor over k, in float32, rounded once.

    Args:
        input_tensor: [T, k, H] float32, bfloat16 or float16.
        output_tensor: [T, H] of its dtype, written.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    output_tensor.copy_(input_tensor.float().sum(dim=1))


@op(mutates=("output_tensor",))
def moe_sum_reduce(
    input_tensor: Tensor, output_tensor: Tensor, routed_scaling_factor: float = 1.0
) -> None:
    """output_tensor becomes routed_scaling_factor times the sum of input_tensor over k, in float32,
    rounded once.

    Args:
        input_tensor: [T, k, H] float32, bfloat16 or float16.
        output_tensor: [T, H] of its dtype, written.
        routed_scaling_factor: the sum is multiplied by it.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    output_tensor.copy_(input_tensor.float().sum(dim=1) * routed_scaling_factor)


def _expect(name: str, input_tensor: Tensor, output_tensor: Tensor) -> None:
    expect(name, "input_tensor", input_tensor, 3, FLOATS)
    tokens, _, width = input_tensor.shape
    dtypes = (input_tensor.dtype,)
    expect(name, "output_tensor", output_tensor, (tokens, width), dtypes, input_tensor)


@moe_sum.check
def _(call: Call) -> None:
    _expect("moe_sum", call.input_tensor, call.output_tensor)


@moe_sum_reduce.check
def _(call: Call) -> None:
    _expect("moe_sum_reduce", call.input_tensor, call.output_tensor)


def _adds(call: Call) -> bool:
    rows = call.input_tensor.is_contiguous()
    return rows and rows_launch.adds(call.output_tensor, call.input_tensor.shape[1])


@moe_sum.implementation("triton", devices=gpu.DEVICES, when=_adds, replayed=True)
def _(call: Call) -> None:
    x = call.input_tensor
    rows_launch.sum_rows(x.view(-1, x.shape[2]), call.output_tensor, x.shape[1])


@moe_sum_reduce.implementation("triton", devices=gpu.DEVICES, when=_adds, replayed=True)
def _(call: Call) -> None:
    x, factor = call.input_tensor, call.routed_scaling_factor
    rows_launch.sum_rows(x.view(-1, x.shape[2]), call.output_tensor, x.shape[1], factor)
