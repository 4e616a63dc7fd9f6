"""Rows in groups of e4m3 or int8, each group with its scale (DeepSeek-V3 report, section 3.3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.quantization import e8m0, launch
from cairn.ops.quantization.codes import E4M3, divided, inverse, scale_for
from cairn.ops.registry import op

BYTES = torch.uint8


@op(mutates=("output_q", "output_s"), aliases={"int8_min": "fp8_min", "int8_max": "fp8_max"})
def sgl_per_token_group_quant_8bit(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float = 1e-10,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: Tensor | None = None,
    enable_v2: bool | None = None,
) -> None:
    """Codes and scales of every group of G = group_size elements of a row.

    s = max(|x|, eps) / fp8_max; the codes are clamp(x * (1 / s), fp8_min, fp8_max) to the nearest
    (e4m3), or clamp(x / s, fp8_min, fp8_max) towards zero (int8). The functions for fp8 and for
    int8 are this one.

    Args:
        input: [..., K] float32, bfloat16 or float16; with fuse_silu_and_mul [..., 2K], and x is
            silu(input[..., :K]) * input[..., K:], rounded to input's dtype after each step.
        output_q: [..., K] float8_e4m3fn or int8, written.
        output_s: written. [..., K / G] float32 of any strides (row-major, or column-major with
            rows padded for TMA). With scale_ue8m0 also int32 [..., ceil(K / G / 4)]: the
            exponents + 127 of four groups in a word, the first in the lowest byte, 0 behind the
            last group.
        group_size: G, divides K.
        eps: least magnitude of a group.
        fp8_min, fp8_max: range of the codes; None: of output_q's dtype. As keywords they may be
            called int8_min and int8_max.
        scale_ue8m0: s is rounded up to a power of two.
        fuse_silu_and_mul: see input.
        masked_m: [E] int32: of input [E, T, ...] only the first masked_m[e] rows are written.
        enable_v2: ignored.
    Raises:
        BadArgument: for another shape, dtype, layout or device.
    """
    x = input
    if fuse_silu_and_mul:
        gate, up = input.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate.float()).to(input.dtype)
        x = (silu.float() * up.float()).to(input.dtype)
    low, high = _range(output_q, fp8_min, fp8_max)
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = scale_for(groups.abs().amax(dim=-1).clamp(min=eps), high)
    exponent = scale
    if scale_ue8m0:
        exponent = e8m0.encode(scale)
        scale = e8m0.decode(exponent)
    if output_q.dtype == torch.int8:
        # Conversion to int8 truncates, and is undefined for NaN.
        number = divided(groups, scale.unsqueeze(-1)).clamp(low, high).nan_to_num(0.0)
    else:
        number = (groups * inverse(scale).unsqueeze(-1)).clamp(low, high)
    codes = number.flatten(-2).to(output_q.dtype)
    if output_s.dtype == torch.int32:
        spare = -exponent.shape[-1] % 4
        scale = torch.nn.functional.pad(exponent, (0, spare)).view(torch.int32)
    if masked_m is None:
        output_q.copy_(codes)
        output_s.copy_(scale)
        return
    used = torch.arange(input.shape[1], device=input.device) < masked_m[:, None]
    output_q.view(BYTES)[used] = codes.view(BYTES)[used]
    output_s[used] = scale[used]


def _range(output_q: Tensor, low: float | None, high: float | None) -> tuple[float, float]:
    """Least and largest code."""
    info: torch.finfo | torch.iinfo
    info = torch.iinfo(torch.int8) if output_q.dtype == torch.int8 else torch.finfo(E4M3)
    return float(info.min if low is None else low), float(info.max if high is None else high)


@sgl_per_token_group_quant_8bit.check
def _(call: Call) -> None:
    name = "sgl_per_token_group_quant_8bit"
    expect(name, "input", call.input, dtypes=FLOATS)
    if call.input.dim() < 2:
        refuse(name, "input", f"has shape {list(call.input.shape)}, not at least two dims")
    width, odd = divmod(call.input.shape[-1], 2 if call.fuse_silu_and_mul else 1)
    if odd or not width:
        refuse(name, "input", f"has rows of {call.input.shape[-1]} numbers")
    if call.group_size < 1 or width % call.group_size:
        refuse(name, "group_size", f"is {call.group_size}: it must divide {width}")
    rows, groups = call.input.shape[:-1], width // call.group_size
    expect(name, "output_q", call.output_q, (*rows, width), (E4M3, torch.int8), like=call.input)
    expect(name, "output_s", call.output_s, dtypes=(torch.float32, torch.int32), like=call.input)
    packed = call.output_s.dtype == torch.int32
    if packed and not call.scale_ue8m0:
        refuse(name, "output_s", "is int32: exponents need scale_ue8m0")
    expect(name, "output_s", call.output_s, (*rows, -(-groups // 4) if packed else groups))
    (low, high), (least, most) = (
        _range(call.output_q, *x) for x in ((call.fp8_min, call.fp8_max), (None, None))
    )
    if not least <= low <= 0 < high <= most:
        hint = f"0 must lie between them, and they between {least:g} and {most:g}"
        refuse(name, "fp8_max", f"is {high:g}, fp8_min {low:g}", hint)
    if call.masked_m is not None:
        expect(name, "input", call.input, (None, None, None))
        expect(
            name, "masked_m", call.masked_m, call.input.shape[:1], (torch.int32,), like=call.input
        )


def _groups(call: Call) -> bool:
    return launch.accepts(call.input, call.output_q, call.group_size, call.masked_m)


@sgl_per_token_group_quant_8bit.implementation(
    "triton", devices=gpu.DEVICES, when=_groups, replayed=True
)
def _(call: Call) -> None:
    low, high = _range(call.output_q, call.fp8_min, call.fp8_max)
    e4m3 = call.output_q.dtype == E4M3
    rounding = "e4m3" if e4m3 else "truncate"
    rule = launch.Rule(
        low, high, rounding, call.eps, e4m3, call.scale_ue8m0, call.fuse_silu_and_mul
    )
    launch.quantize(call.input, call.output_q, call.output_s, call.group_size, rule, call.masked_m)


sgl_per_token_group_quant_fp8 = sgl_per_token_group_quant_8bit
sgl_per_token_group_quant_int8 = sgl_per_token_group_quant_8bit
