"""A matrix in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.quantization import launch, nvfp4, nvfp4_launch
from cairn.ops.quantization.codes import E4M3_MAX
from cairn.ops.quantization.kernels import global_scale_kernel
from cairn.ops.registry import op


@op
def scaled_fp4_quant(input: Tensor, input_global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and block scales of input in the format of `cairn.ops.quantization.nvfp4`.

    Args:
        input: [..., K] float32, bfloat16 or float16, K a multiple of 16; M rows in all.
        input_global_scale: [1] float32, g, normally `suggest_nvfp4_global_scale(input)`.
    Returns:
        codes [M, K / 2] uint8, and scales [M', S'] float8_e4m3fn in tiles: M' and S' are M and
        K / 16 rounded up to multiples of 128 and 4, zero in what that adds.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    rows = input.reshape(-1, input.shape[-1])
    codes, scales = nvfp4.quantize(rows, input_global_scale.reshape(()))
    return codes, nvfp4.tiled(scales)


@scaled_fp4_quant.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    rows = call.input.numel() // call.input.shape[-1]
    return nvfp4.blank(call.input, rows, rows)


@scaled_fp4_quant.check
def _(call: Call) -> None:
    nvfp4.expect_input("scaled_fp4_quant", "input", call.input, None)
    _expect_one("scaled_fp4_quant", call.input_global_scale, call.input)


def _expect_one(name: str, scale: Tensor, input: Tensor) -> None:
    expect(name, "input_global_scale", scale, dtypes=(torch.float32,), like=input)
    if scale.numel() != 1:
        refuse(name, "input_global_scale", f"has shape {list(scale.shape)}, not [1]")


def _in_rows(call: Call) -> bool:
    return (call.input.is_contiguous() or call.input.dim() == 2) and nvfp4_launch.in_rows(
        call.input, 1
    )


@scaled_fp4_quant.implementation("triton", devices=gpu.DEVICES, when=_in_rows, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor]:
    rows = call.input if call.input.dim() == 2 else call.input.view(-1, call.input.shape[-1])
    return nvfp4_launch.quantize(rows, call.input_global_scale)


@op
def suggest_nvfp4_global_scale(x: Tensor) -> Tensor:
    """448 * 6 / max |x| as [1] float32: the block with the largest number has the scale 448.

    1 where x is zero or empty.

    Args:
        x: any shape, float32, bfloat16 or float16.
    Raises:
        BadArgument: for another dtype.
    """
    amax = x.float().abs().amax() if x.numel() else x.new_zeros((), dtype=torch.float32)
    return torch.where(amax == 0, 1.0, E4M3_MAX * nvfp4.LARGEST / amax).reshape(1)


@suggest_nvfp4_global_scale.check
def _(call: Call) -> None:
    expect("suggest_nvfp4_global_scale", "x", call.x, dtypes=FLOATS)


def _flat(call: Call) -> bool:
    return call.x.is_contiguous()


@suggest_nvfp4_global_scale.implementation("triton", devices=gpu.DEVICES, when=_flat, replayed=True)
def _(call: Call) -> Tensor:
    x = call.x
    scale = gpu.empty((1,), torch.float32, x.device)
    if x.numel() > launch.ONE_PROGRAM:
        x = launch.amax_parts(x).view(torch.float32)
    count = x.numel()
    block = min(launch.AMAX_BLOCK, gpu.next_power_of_2(max(1, count)))
    global_scale_kernel[(1,)](
        x=x,
        scale=scale,
        count=count,
        BLOCK=block,
        num_warps=8,
    )
    return scale
