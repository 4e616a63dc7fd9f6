"""A tensor in float8 e4m3 with one scale."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.pdl import uses_pdl
from cairn.ops.quantization import launch
from cairn.ops.quantization.codes import E4M3, E4M3_MAX, e4m3, inverse, scale_for
from cairn.ops.quantization.kernels import tensor_kernel
from cairn.ops.registry import op

BLOCK, STATIC_BLOCK, WARPS = 4096, 2048, 8
"""Elements per program, the same where the scale is given, and warps."""
PDL_BLOCK, PDL_WARPS = 256, 4
"""Numbers and warps where the scale is given, of a program that is launched with PDL."""
RULE = launch.Rule(-E4M3_MAX, E4M3_MAX, "e4m3", inverse=True)


@op(mutates=("output_q", "output_s"))
def sgl_per_tensor_quant_fp8(
    input: Tensor, output_q: Tensor, output_s: Tensor, is_static: bool
) -> None:
    """output_q = e4m3(clamp(input * (1 / s), -448, 448)).

    Args:
        input: any shape, float32, bfloat16 or float16.
        output_q: of input's shape, float8_e4m3fn, written.
        output_s: [1] float32; is_static: s, read; else written: s = max |input| / 448, 0 for
            zeros (then all codes are 0). It need not be cleared before.
        is_static: see output_s.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x = input.float()
    if not is_static:
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
        output_s.copy_(scale_for(amax, E4M3_MAX))
    output_q.copy_(e4m3(x * inverse(output_s.reshape(()))))


@sgl_per_tensor_quant_fp8.check
def _(call: Call) -> None:
    name = "sgl_per_tensor_quant_fp8"
    expect(name, "input", call.input, dtypes=FLOATS)
    expect(name, "output_q", call.output_q, call.input.shape, (E4M3,), like=call.input)
    expect(name, "output_s", call.output_s, dtypes=(torch.float32,), like=call.input)
    if call.output_s.numel() != 1:
        refuse(name, "output_s", f"has shape {list(call.output_s.shape)}, not [1]")


def _flat(call: Call) -> bool:
    return call.input.is_contiguous() and call.output_q.is_contiguous()


@sgl_per_tensor_quant_fp8.implementation("triton", devices=gpu.DEVICES, when=_flat, replayed=True)
def _(call: Call) -> None:
    count = call.input.numel()
    if 0 < count <= launch.ONE_PROGRAM and not call.is_static:
        one = (1, count)
        launch.quantize(
            call.input.view(one), call.output_q.view(one), call.output_s.view(1, 1), count, RULE
        )
        return
    if call.is_static and not count:
        return
    most, warps = (STATIC_BLOCK, WARPS) if call.is_static else (BLOCK, WARPS)
    if call.is_static and uses_pdl(call.input.device, 1, -(-count // PDL_BLOCK) * PDL_WARPS):
        most, warps = PDL_BLOCK, PDL_WARPS
    block = min(most, gpu.next_power_of_2(count)) if call.is_static else most
    parts = None if call.is_static else launch.amax_parts(call.input)
    number_of_parts = 1 if parts is None else parts.numel()
    programs = max(-(-count // block), 1)
    pdl = uses_pdl(call.input.device, 1, programs * warps)
    tensor_kernel[(programs,)](
        x=call.input,
        q=call.output_q.view(torch.uint8),
        scale=call.output_s,
        parts=parts,
        count=count,
        number_of_parts=number_of_parts,
        high=E4M3_MAX,
        PARTS=gpu.next_power_of_2(number_of_parts),
        BLOCK=block,
        HARDWARE=gpu.supports_e4m3(call.input.device),
        PDL=pdl,
        num_warps=warps,
    )
