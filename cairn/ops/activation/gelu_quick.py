"""The activation of CLIP's feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.activation import launch
from cairn.ops.registry import op


@op
def gelu_quick(input: Tensor, out: Tensor | None = None) -> Tensor:
    """input * sigmoid(1.702 input), in float32, rounded once.

    Args:
        input: [..., d] float32, bfloat16 or float16; rows may be strided.
        out: [..., d] of input's dtype, written and returned if given; may be `input`.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    return (x * torch.sigmoid(1.702 * x)).to(input.dtype)


launch.register(gelu_quick, "gelu_quick", gates=1)
