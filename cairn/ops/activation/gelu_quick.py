"""The activation of CLIP's feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.activation import launch
from cairn.ops.call import Call
from cairn.ops.registry import op


@op
def gelu_quick(input: Tensor, out: Tensor | None = None) -> Tensor:
    """input * sigmoid(1.702 input), in float32, rounded once.

    Args:
        input: [..., d] float32, bfloat16 or float16; rows may be strided.
        out: [..., d] of input's dtype, written and returned when given; may be `input`.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    return (x * torch.sigmoid(1.702 * x)).to(input.dtype)


@gelu_quick.check
def _(call: Call) -> None:
    launch.check("gelu_quick", call.input, call.out, gates=1)


@gelu_quick.implementation(
    "triton", devices=gpu.DEVICES, when=lambda call: call.input.stride(-1) == 1, replayed=True
)
def _(call: Call) -> Tensor:
    return launch.launch("gelu_quick", call.input, call.out, gates=1)
