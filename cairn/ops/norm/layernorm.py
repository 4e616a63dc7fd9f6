"""Layer normalisation (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.norm.kernels import layernorm_kernel
from cairn.ops.norm.launch import check_rows, check_weight, in_rows
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op


@op
def layernorm(input: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """(input - mean) * rsqrt(variance + eps) * weight + bias, in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        weight: [H], input's dtype or float32.
        bias: as weight, or None.
        eps: added to the (biased) variance.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    shift = None if bias is None else bias.float()
    x = torch.nn.functional.layer_norm(input.float(), weight.shape, weight.float(), shift, eps)
    return x.to(input.dtype)


@layernorm.check
def _(call: Call) -> None:
    check_rows("layernorm", call.input, call.weight)
    if call.bias is not None:
        check_weight("layernorm", "bias", call.bias, call.input)


@layernorm.implementation("triton", devices=gpu.DEVICES, when=in_rows, replayed=True)
def _(call: Call) -> Tensor:
    width = call.input.shape[-1]
    x = call.input.reshape(-1, width)
    out = gpu.empty(call.input.shape, call.input.dtype, call.input.device)
    block = gpu.next_power_of_2(width)
    warps = gpu.warps_for(block)
    pdl = uses_pdl(x.device, len(x), warps)
    if len(x):
        layernorm_kernel[(len(x),)](
            x=x,
            weight=call.weight,
            bias=call.bias,
            out=out,
            x_stride=x.stride(0),
            width=width,
            eps=call.eps,
            BLOCK=block,
            PDL=pdl,
            num_warps=warps,
        )
    return out
