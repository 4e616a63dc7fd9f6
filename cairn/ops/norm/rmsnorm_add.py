"""Root mean square normalisation of a branch's output, added to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.norm.kernels import rmsnorm_add_kernel
from cairn.ops.norm.launch import both_in_rows, check_sum, rows_of
from cairn.ops.registry import op

PDL_ROWS = 16
"""At most this many rows are launched with PDL."""


@op(mutates=("residual",))
def rmsnorm_add(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """residual += rmsnorm(input), in float32, rounded once.

    Args:
        input: [..., H] float32, bfloat16 or float16; rows may be strided.
        residual: [..., H], input's dtype, changed.
        weight: [H], input's dtype or float32.
        eps: added to the mean square.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    residual.copy_(residual.float() + x * scale * weight.float())


@rmsnorm_add.check
def _(call: Call) -> None:
    check_sum("rmsnorm_add", call.input, call.residual, call.weight)


@rmsnorm_add.implementation("torch", devices=("cpu",))
def _(call: Call) -> None:
    """Three to five calls of PyTorch instead of eight, which is faster for few rows."""
    normed = torch.nn.functional.rms_norm(
        call.input.float(), call.weight.shape, call.weight.float(), call.eps
    )
    call.residual.copy_(normed.add_(call.residual))


@rmsnorm_add.implementation("triton", devices=gpu.DEVICES, when=both_in_rows, replayed=True)
def _(call: Call) -> None:
    x, other = rows_of(call.input), rows_of(call.residual)
    assert x is not None and other is not None
    rows, width = x.shape
    block = gpu.next_power_of_2(width)
    pdl = rows <= PDL_ROWS and gpu.supports_pdl(call.input.device)
    if rows:
        rmsnorm_add_kernel[(rows,)](
            x=x,
            residual=other,
            weight=call.weight,
            x_stride=x.stride(0),
            residual_stride=other.stride(0),
            width=width,
            eps=call.eps,
            BLOCK=block,
            PDL=pdl,
            num_warps=gpu.warps_for(block),
        )
