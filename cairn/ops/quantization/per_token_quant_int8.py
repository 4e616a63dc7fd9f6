"""Rows in int8, each with its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.quantization import launch
from cairn.ops.quantization.codes import INT8_MAX, inverse, scale_for
from cairn.ops.registry import op

RULE = launch.Rule(-INT8_MAX, INT8_MAX, "nearest", inverse=True)


@op
def per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """s = max |row| / 127 and q = row * (1 / s) to the nearest, ties to even.

    A row of zeros has the scale 0 and codes of 0; where a row is not finite, NaN has the code 0.

    Args:
        x: [..., K] float32, bfloat16 or float16.
    Returns:
        q [..., K] int8 and s [..., 1] float32.
    Raises:
        BadArgument: for another dtype, or empty rows.
    """
    numbers = x.float()
    scale = scale_for(numbers.abs().amax(dim=-1, keepdim=True), INT8_MAX)
    scaled = (numbers * inverse(scale)).clamp(-INT8_MAX, INT8_MAX)
    return scaled.nan_to_num(0.0).round().to(torch.int8), scale


@per_token_quant_int8.check
def _(call: Call) -> None:
    expect("per_token_quant_int8", "x", call.x, dtypes=FLOATS)
    if not call.x.dim() or not call.x.shape[-1]:
        refuse("per_token_quant_int8", "x", f"has shape {list(call.x.shape)}: rows of no numbers")


@per_token_quant_int8.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.x.stride(-1) == 1 and call.x.shape[-1] <= launch.WIDEST,
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    width = call.x.shape[-1]
    codes = gpu.empty(call.x.shape, torch.int8, call.x.device)
    scale = gpu.empty((*call.x.shape[:-1], 1), torch.float32, call.x.device)
    rows = call.x if call.x.dim() == 2 else call.x.reshape(-1, width)
    launch.quantize(rows, codes.view(-1, width), scale.view(-1, 1), width, RULE)
    return codes, scale
