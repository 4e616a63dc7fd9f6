"""Root mean square normalisation (Zhang and Sennrich 2019, equation 4)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu
from cairn.ops.call import Call
from cairn.ops.norm import loops
from cairn.ops.norm.launch import register_rows
from cairn.ops.registry import op


@op
def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """input * rsqrt(mean(input^2) + eps) * weight, in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        eps: added to the mean square.
        out: [..., H] of input's dtype, written and returned if given; may be `input`.
        enable_pdl: ignored.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * weight.float()).to(input.dtype)


def _same_dtype(call: Call) -> bool:
    return call.input.dtype == call.weight.dtype


def _dense(call: Call) -> bool:
    return call.input.is_contiguous() and (call.out is None or call.out.is_contiguous())


@rmsnorm.implementation("numba", devices=cpu.DEVICES, when=_dense)
def _(call: Call) -> Tensor:
    result = torch.empty_like(call.input) if call.out is None else call.out
    rows, target = (cpu.as_array(x.view(-1, x.shape[-1])) for x in (call.input, result))
    loops.norm_rows(rows, cpu.as_array(call.weight), np.float32(call.eps), target)
    return result


@rmsnorm.implementation("torch", devices=("cpu",), when=_same_dtype)
def _(call: Call) -> Tensor:
    """The same operations as one call of PyTorch's C++ instead of seven, which is faster for few
    rows."""
    return torch.nn.functional.rms_norm(call.input, call.weight.shape, call.weight, call.eps)


register_rows(rmsnorm)
