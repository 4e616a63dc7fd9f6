"""The product of matrices in e4m3 with a scale for each block (DeepSeek-V3 report, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect, refuse
from cairn.ops.moe import experts_launch
from cairn.ops.moe.experts_launch import Scaled
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op

NAME = "fp8_blockwise_scaled_mm"


@op
def fp8_blockwise_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """a @ b of the dequantised matrices, in float32, rounded once.

    Args:
        mat_a: [M, K] float8_e4m3fn.
        mat_b: [K, N] float8_e4m3fn.
        scales_a: [M, ceil(K / 128)] float32, any strides: scales per 128 elements of a row.
        scales_b: [ceil(K / 128), ceil(N / 128)] float32, any strides: scales per block of 128 x
            128.
        out_dtype: float32, bfloat16 or float16.
    Returns:
        [M, N].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    a = mat_a.float() * blocks.spread(scales_a, 1, mat_a.shape[1])
    return (a @ blocks.dequantized(mat_b.t(), scales_b.t()).t()).to(out_dtype)


@fp8_blockwise_scaled_mm.check
def _(call: Call) -> None:
    expect(NAME, "mat_a", call.mat_a, 2, (E4M3,))
    rows, width = call.mat_a.shape
    expect(NAME, "mat_b", call.mat_b, (width, None), (E4M3,), call.mat_a)
    across, down = blocks.count(width), blocks.count(call.mat_b.shape[1])
    expect(NAME, "scales_a", call.scales_a, (rows, across), FLOAT32, call.mat_a)
    expect(NAME, "scales_b", call.scales_b, (across, down), FLOAT32, call.mat_a)
    if call.out_dtype not in FLOATS:
        refuse(NAME, "out_dtype", f"is {call.out_dtype}, not float32, bfloat16 or float16")


@fp8_blockwise_scaled_mm.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.mat_a.stride(1) == 1 and call.mat_b.t().is_contiguous(),
    replayed=True,
)
def _(call: Call) -> Tensor:
    shape = (call.mat_a.shape[0], call.mat_b.shape[1])
    out = gpu.empty(shape, call.out_dtype, call.mat_a.device)
    weight = Scaled(call.mat_b.t().unsqueeze(0), call.scales_b.t().unsqueeze(0))
    return experts_launch.multiply_all(Scaled(call.mat_a, call.scales_a), weight, out)
