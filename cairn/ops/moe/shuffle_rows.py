"""Gather of token rows in the order of their experts."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, expect, expect_within, refuse
from cairn.ops.moe import rows_launch
from cairn.ops.registry import op

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
        input_tensor: [rows, ...] of a floating-point (also 8-bit) or integer dtype.
        dst2src_map: [N] int32 or int64.
        output_tensor_shape: shape of the result; its first dim is N.
    Returns:
        A tensor of output_tensor_shape and input_tensor's dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for rows out of range.
    """
    shape = (dst2src_map.shape[0], *input_tensor.shape[1:])
    return input_tensor.index_select(0, dst2src_map).view(shape)


@shuffle_rows.check
def _(call: Call) -> None:
    expect(NAME, "input_tensor", call.input_tensor, dtypes=DTYPES)
    if not call.input_tensor.dim():
        refuse(NAME, "input_tensor", "has shape [], not [rows, ...]")
    expect(NAME, "dst2src_map", call.dst2src_map, 1, INDICES, call.input_tensor)
    expect_within(NAME, "dst2src_map", call.dst2src_map, call.input_tensor.shape[0])
    wanted = [call.dst2src_map.shape[0], *call.input_tensor.shape[1:]]
    if list(call.output_tensor_shape) != wanted:
        refuse(NAME, "output_tensor_shape", f"is {list(call.output_tensor_shape)}, not {wanted}")


@shuffle_rows.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.input_tensor.dim() == 2
        and call.input_tensor.stride(1) == 1
        and call.dst2src_map.is_contiguous()
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    return rows_launch.gather_rows(call.input_tensor, call.dst2src_map)
