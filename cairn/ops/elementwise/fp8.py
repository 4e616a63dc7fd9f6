"""Casts to float8: scaled, clamped to the largest value, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, on_host, refuse
from cairn.ops.elementwise.kernels import downcast_kernel, fp8_kernel
from cairn.ops.memory.rows import store_rows
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = (E4M3, E5M2)
BLOCK, WARPS = 2048, 8
"""Elements and warps per program."""
PDL_BLOCK, PDL_WARPS = 1024, 4
"""The same when launched with PDL."""


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x float32 clamped to the dtype's range and rounded to nearest even; NaN stays."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


@op
def fp8_quantize(
    x: Tensor,
    scale_inv: float = 1.0,
    out: Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    enable_pdl: bool | None = None,
) -> Tensor:
    """x * scale_inv as float8: the product in float32, clamped to the largest value, rounded once.

    Args:
        x: [..., d] float32, bfloat16 or float16, may be strided.
        scale_inv: one over the scale that the result is to be multiplied by.
        out: x's shape, of fp8_dtype, written and returned if given.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        enable_pdl: ignored.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return to_fp8(x.float() * scale_inv, fp8_dtype)


@fp8_quantize.check
def _(call: Call) -> None:
    expect("fp8_quantize", "x", call.x, dtypes=FLOATS)
    if call.fp8_dtype not in KINDS:
        refuse(
            "fp8_quantize", "fp8_dtype", f"is {call.fp8_dtype}, not float8_e4m3fn or float8_e5m2"
        )
    if call.out is not None:
        expect("fp8_quantize", "out", call.out, call.x.shape, (call.fp8_dtype,), like=call.x)


@fp8_quantize.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> Tensor:
    result = call.out
    if result is None or not result.is_contiguous():
        result = gpu.empty(call.x.shape, call.fp8_dtype, call.x.device)
    if call.x.numel():
        # Contiguous memory is one row.
        rows = (
            call.x.view(1, -1) if call.x.is_contiguous() else call.x.reshape(-1, call.x.shape[-1])
        )
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        width = rows.shape[1]
        pdl = uses_pdl(call.x.device, rows.shape[0], -(-width // PDL_BLOCK) * PDL_WARPS)
        block, warps = (PDL_BLOCK, PDL_WARPS) if pdl else (BLOCK, WARPS)
        blocks = -(-width // block)
        fp8_kernel[(rows.shape[0] * blocks,)](
            x=rows,
            out=result.view(torch.uint8),
            scale_inv=float(call.scale_inv),
            x_stride=rows.stride(0),
            out_stride=width,
            width=width,
            blocks=blocks,
            BLOCK=block,
            E4M3=call.fp8_dtype == E4M3,
            HARDWARE=gpu.supports_e4m3(call.x.device),
            PDL=pdl,
            num_warps=warps,
        )
    return result


@op(mutates=("k_out", "v_out"))
def downcast_fp8(
    k: Tensor,
    v: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    loc: Tensor,
    mult: int = 1,
    offset: int = 0,
) -> None:
    """Row loc * mult + offset of k_out becomes k * (1 / k_scale) as float8 e4m3; the same of v.

    The reciprocal and the product are in float32; what is larger than 448 becomes 448.

    Args:
        k, v: [T, H, d] float32, bfloat16 or float16, same dtype; tokens may be strided.
        k_out, v_out: [slots, H, d] float8_e4m3fn, or its bytes as uint8, changed.
        k_scale, v_scale: one float32; None: 1.
        loc: [T] int32 or int64; a negative one is not written.
        mult, offset: from a location to a row.
    Raises:
        BadArgument: for another shape, dtype or device, and on the CPU for a row out of range.
    """
    slots = torch.where(loc < 0, -1, loc.long() * mult + offset)
    for x, out, scale in ((k, k_out, k_scale), (v, v_out, v_scale)):
        factor = 1.0 if scale is None else 1.0 / scale
        rows = to_fp8(x.float() * factor, E4M3).view(torch.uint8)
        store_rows(out.view(torch.uint8), slots, rows)


@downcast_fp8.check
def _(call: Call) -> None:
    name = "downcast_fp8"
    expect(name, "k", call.k, (None, None, None), FLOATS)
    expect(name, "v", call.v, call.k.shape, (call.k.dtype,), like=call.k)
    for argument, out in (("k_out", call.k_out), ("v_out", call.v_out)):
        expect(name, argument, out, (None, *call.k.shape[1:]), (torch.uint8, E4M3), like=call.k)
    for argument, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is not None:
            expect(name, argument, scale, (1,) * scale.dim(), (torch.float32,), like=call.k)
    expect(name, "loc", call.loc, call.k.shape[:1], INDICES, like=call.k)
    if on_host(call.loc):
        rows = call.loc[call.loc >= 0].long() * call.mult + call.offset
        expect_within(name, "loc * mult + offset", rows, min(len(call.k_out), len(call.v_out)))


def _dense(call: Call) -> bool:
    return call.loc.is_contiguous() and all(
        x[:1].is_contiguous() for x in (call.k, call.v, call.k_out, call.v_out)
    )


@downcast_fp8.implementation("triton", devices=gpu.DEVICES, when=_dense, replayed=True)
def _(call: Call) -> None:
    tokens, width = call.k.shape[0], call.k.shape[1:].numel()
    block = min(BLOCK, gpu.next_power_of_2(max(1, width)))
    k_bytes, v_bytes = call.k_out.view(torch.uint8), call.v_out.view(torch.uint8)
    blocks, warps = -(-width // block), gpu.warps_for(block)
    pdl = uses_pdl(call.k.device, tokens, blocks * warps)
    if tokens and width:
        downcast_kernel[(tokens * blocks,)](
            k=call.k,
            v=call.v,
            k_out=k_bytes,
            v_out=v_bytes,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
            location=call.loc,
            mult=call.mult,
            offset=call.offset,
            k_stride=call.k.stride(0),
            v_stride=call.v.stride(0),
            k_out_stride=call.k_out.stride(0),
            v_out_stride=call.v_out.stride(0),
            width=width,
            BLOCKS=blocks,
            BLOCK=block,
            HARDWARE=gpu.supports_e4m3(call.k.device),
            PDL=pdl,
            num_warps=warps,
        )
