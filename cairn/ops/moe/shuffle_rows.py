"""Rows of tokens in the order of their experts."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import INDICES, expect, expect_within, refuse
from cairn.ops.moe import routing
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

NAME = "shuffle_rows"
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


@op
def shuffle_rows(
    input_tensor: Tensor, dst2src_map: Tensor, output_tensor_shape: list[int]
) -> Tensor:
    """Row i of the result is row dst2src_map[i] of input_tensor.

    Args:
        input_tensor: [rows, ...] of floating-point numbers, of 8 bits too, or of integers.
        dst2src_map: [N] int32 or int64.
        output_tensor_shape: of the result, N first.
    Returns:
        Of output_tensor_shape and input_tensor's dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for rows that there are not.
    """
    shape = (dst2src_map.shape[0], *input_tensor.shape[1:])
    return input_tensor.index_select(0, dst2src_map).view(shape)


@shuffle_rows.check
def _(input_tensor: Tensor, dst2src_map: Tensor, output_tensor_shape: list[int]) -> None:
    expect(NAME, "input_tensor", input_tensor, dtypes=DTYPES)
    if not input_tensor.dim():
        refuse(NAME, "input_tensor", "has shape [], not [rows, ...]")
    expect(NAME, "dst2src_map", dst2src_map, 1, INDICES, input_tensor)
    expect_within(NAME, "dst2src_map", dst2src_map, input_tensor.shape[0])
    wanted = [dst2src_map.shape[0], *input_tensor.shape[1:]]
    if list(output_tensor_shape) != wanted:
        refuse(NAME, "output_tensor_shape", f"is {list(output_tensor_shape)}, not {wanted}")


@shuffle_rows.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        order = make.randint(0, 5, 9, dtype=torch.int32)
        yield make.args(make.randn(5, 24, dtype=dtype), order, [9, 24])
    codes = make.randint(0, 255, 4, 16, dtype=torch.int32).to(torch.uint8)
    yield make.args(codes, make.randint(0, 4, 6), [6, 16])
    yield make.args(make.randn(5, 8), make.randint(0, 5, 0), [0, 8])


@shuffle_rows.bench
def _(draw: Draw) -> Points:
    for tokens, _, topk in routing.routers_of(draw):
        x, order = draw.randn(tokens, routing.WIDTH), draw.randint(0, tokens, tokens * topk)
        shape = [tokens * topk, routing.WIDTH]
        least = moved(x, order) + tokens * topk * routing.WIDTH * x.element_size()
        yield Point(f"{tokens} x {topk}", draw.args(x, order, shape), least)
