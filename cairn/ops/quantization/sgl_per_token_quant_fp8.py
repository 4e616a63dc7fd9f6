"""Rows in float8 e4m3, each with its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.quantization import launch
from cairn.ops.quantization.codes import E4M3, E4M3_MAX, e4m3, inverse, scale_for
from cairn.ops.registry import op

RULE = launch.Rule(-E4M3_MAX, E4M3_MAX, "e4m3", inverse=True)


@op(mutates=("output_q", "output_s"))
def sgl_per_token_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor) -> None:
    """output_s[t] = max |input[t]| / 448; output_q[t] = e4m3(clamp(input[t] * (1 / output_s[t]))).

    A row of zeros has the scale 0 and codes of 0.

    Args:
        input: [T, K] float32, bfloat16 or float16, rows of any stride.
        output_q: [T or more, K] float8_e4m3fn, the first T rows written.
        output_s: [T or more] or [T or more, 1] float32, the same.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    x, tokens = input.float(), len(input)
    scale = scale_for(x.abs().amax(dim=1, keepdim=True), E4M3_MAX)
    output_s[:tokens] = scale.view(-1, *output_s.shape[1:])
    output_q[:tokens] = e4m3(x * inverse(scale))


@sgl_per_token_quant_fp8.check
def _(call: Call) -> None:
    name = "sgl_per_token_quant_fp8"
    expect(name, "input", call.input, (None, None), FLOATS)
    if not call.input.shape[1]:
        refuse(name, "input", "has rows of no numbers")
    expect(name, "output_q", call.output_q, (None, call.input.shape[1]), (E4M3,), like=call.input)
    expect(name, "output_s", call.output_s, dtypes=(torch.float32,), like=call.input)
    tokens = call.input.shape[0]
    if len(call.output_q) < tokens:
        refuse(name, "output_q", f"has {len(call.output_q)} rows, input {tokens}")
    if (
        call.output_s.dim() == 0
        or len(call.output_s) < tokens
        or call.output_s.shape[1:] not in ((), (1,))
    ):
        refuse(name, "output_s", f"has shape {list(call.output_s.shape)}, not [{tokens}]")


def _rows(call: Call) -> bool:
    return launch.accepts(call.input, call.output_q, call.input.shape[1])


@sgl_per_token_quant_fp8.implementation("triton", devices=gpu.DEVICES, when=_rows, replayed=True)
def _(call: Call) -> None:
    tokens = len(call.input)
    scales = call.output_s if call.output_s.dim() == 2 else call.output_s.unsqueeze(1)
    launch.quantize(call.input, call.output_q[:tokens], scales[:tokens], call.input.shape[1], RULE)
