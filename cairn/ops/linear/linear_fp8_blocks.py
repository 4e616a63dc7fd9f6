"""Linear layer with a block-quantised e4m3 weight; tokens are quantised on the fly."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, expect
from cairn.ops.moe import experts_launch
from cairn.ops.moe.experts_launch import Scaled
from cairn.ops.quantization import blocks
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op

NAME = "linear_fp8_blocks"


@op
def linear_fp8_blocks(input: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x @ w.T, in float32, rounded once, where w is the dequantised weight, and x is input rounded
    to e4m3 with a scale for every 128 elements: max(|x|, 1e-10) / 448.

    Args:
        input: [T, K] float32, bfloat16 or float16.
        weight: [N, K] float8_e4m3fn.
        scale: [ceil(N / 128), ceil(K / 128)] float32: scales per block of 128 x 128.
    Returns:
        [T, N] of input's dtype.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    product = blocks.rounded(input) @ blocks.dequantized(weight, scale).t()
    return product.to(input.dtype)


@linear_fp8_blocks.check
def _(call: Call) -> None:
    expect(NAME, "input", call.input, 2, FLOATS)
    width = call.input.shape[1]
    expect(NAME, "weight", call.weight, (None, width), (E4M3,), call.input)
    shape = (blocks.count(call.weight.shape[0]), blocks.count(width))
    expect(NAME, "scale", call.scale, shape, FLOAT32, call.input)


@linear_fp8_blocks.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.input.stride(1) == 1
        and call.weight.is_contiguous()
        and call.input.shape[1] % blocks.SIZE == 0
    ),
    replayed=True,
)
def _(call: Call) -> Tensor:
    shape = (call.input.shape[0], call.weight.shape[0])
    out = gpu.empty(shape, call.input.dtype, call.input.device)
    weight = Scaled(call.weight.unsqueeze(0), call.scale.unsqueeze(0))
    return experts_launch.multiply_all(Scaled(call.input), weight, out)
