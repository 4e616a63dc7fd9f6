"""What the experts of a token give, added."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import FLOATS, expect
from cairn.ops.moe import routing
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


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
        routed_scaling_factor: of the sum.
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
def _(input_tensor: Tensor, output_tensor: Tensor) -> None:
    _expect("moe_sum", input_tensor, output_tensor)


@moe_sum_reduce.check
def _(input_tensor: Tensor, output_tensor: Tensor, routed_scaling_factor: float = 1.0) -> None:
    _expect("moe_sum_reduce", input_tensor, output_tensor)


@moe_sum.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(5, 3, 33, dtype=dtype), make.empty(5, 33, dtype=dtype))
    yield make.args(make.randn(0, 3, 8), make.empty(0, 8))
    yield make.args(make.randn(2, 0, 8), make.empty(2, 8))


@moe_sum_reduce.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield make.args(make.randn(5, 3, 33, dtype=dtype), make.empty(5, 33, dtype=dtype), 2.5)
    yield make.args(make.randn(4, 1, 8), make.empty(4, 8))


@moe_sum.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routing.routers_of(draw):
        x, out = draw.randn(tokens, topk, routing.WIDTH), draw.randn(tokens, routing.WIDTH)
        yield Point(f"{tokens} x {topk}", draw.args(x, out), moved(x, out))


@moe_sum_reduce.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routing.routers_of(draw):
        x, out = draw.randn(tokens, topk, routing.WIDTH), draw.randn(tokens, routing.WIDTH)
        yield Point(f"{tokens} x {topk}", draw.args(x, out, 2.5), moved(x, out))
