"""Keys of MLA heads, concatenated from their two parts, and values, cast to float8."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.elementwise.fp8 import E4M3, KINDS, to_fp8
from cairn.ops.elementwise.kernels import pack_kernel
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

NAME = "mla_kv_pack_quantize_fp8"
BLOCK, WARPS = 1024, 4
"""Elements and warps per program."""


@op(mutates=("k_out", "v_out"))
def mla_kv_pack_quantize_fp8_into(
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    k_scale_inv: float = 1.0,
    v_scale_inv: float = 1.0,
) -> None:
    """`mla_kv_pack_quantize_fp8` into given tensors.

    Args:
        k_nope, k_pe, v, k_scale_inv, v_scale_inv: as in `mla_kv_pack_quantize_fp8`.
        k_out, v_out: [T, H, dn + dr], [T, H, dv] float8_e4m3fn or float8_e5m2, contiguous; changed.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    keys = torch.cat((k_nope, k_pe.expand(-1, k_nope.shape[1], -1)), dim=-1)
    k_out.copy_(to_fp8(keys.float() * k_scale_inv, k_out.dtype))
    v_out.copy_(to_fp8(v.float() * v_scale_inv, v_out.dtype))


@mla_kv_pack_quantize_fp8_into.front
def mla_kv_pack_quantize_fp8(
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    k_scale_inv: float = 1.0,
    v_scale_inv: float = 1.0,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """[k_nope | k_pe] * k_scale_inv and v * v_scale_inv as float8: products in float32, clamped to
    the largest value, rounded once.

    Args:
        k_nope: [T, H, dn] float32, bfloat16 or float16; tokens and heads may be strided.
        k_pe: [T, 1, dr] of k_nope's dtype, shared by all heads; tokens may be strided.
        v: [T, H, dv] of k_nope's dtype; tokens and heads may be strided.
        k_scale_inv, v_scale_inv: one over the scales that the results are to be multiplied by.
        k_out, v_out: [T, H, dn + dr], [T, H, dv] of fp8_dtype, contiguous, written and returned.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
    Returns:
        (keys [T, H, dn + dr], values [T, H, dv]) of fp8_dtype.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    if fp8_dtype not in KINDS:
        refuse(NAME, "fp8_dtype", f"is {fp8_dtype}, not float8_e4m3fn or float8_e5m2")
    for name, part in (("k_nope", k_nope), ("k_pe", k_pe), ("v", v)):
        expect(NAME, name, part, 3, FLOATS)
    tokens, heads, width = k_nope.shape
    if k_out is None:
        shape = (tokens, heads, width + k_pe.shape[2])
        k_out = gpu.empty(shape, fp8_dtype, k_nope.device)
    if v_out is None:
        v_out = gpu.empty(v.shape, fp8_dtype, v.device)
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        expect(NAME, name, out, 3, (fp8_dtype,))
    mla_kv_pack_quantize_fp8_into(k_nope, k_pe, v, k_out, v_out, k_scale_inv, v_scale_inv)
    return k_out, v_out


@mla_kv_pack_quantize_fp8_into.check
def _(call: Call) -> None:
    k, pe, v = call.k_nope, call.k_pe, call.v
    expect(NAME, "k_nope", k, 3, FLOATS, dense=1)
    tokens, heads, width = k.shape
    expect(NAME, "k_pe", pe, (tokens, 1, None), (k.dtype,), like=k, dense=1)
    expect(NAME, "v", v, (tokens, heads, None), (k.dtype,), like=k, dense=1)
    shape = (tokens, heads, width + pe.shape[2])
    expect(NAME, "k_out", call.k_out, shape, KINDS, like=k, dense=-1)
    expect(NAME, "v_out", call.v_out, v.shape, (call.k_out.dtype,), like=k, dense=-1)


@mla_kv_pack_quantize_fp8_into.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    k, pe, v, device = call.k_nope, call.k_pe, call.v, call.k_nope.device
    tokens, heads, width = k.shape
    wide = max(call.k_out.shape[2], v.shape[2])
    blocks = -(-heads * wide // BLOCK)
    if tokens and blocks:
        pdl = uses_pdl(device, 2 * tokens, blocks * WARPS)
        pack_kernel[(2 * tokens * blocks,)](
            k_nope=k,
            k_pe=pe,
            v=v,
            k_out=call.k_out.view(torch.uint8),
            v_out=call.v_out.view(torch.uint8),
            k_scale_inv=float(call.k_scale_inv),
            v_scale_inv=float(call.v_scale_inv),
            k_token=k.stride(0),
            k_head=k.stride(1),
            pe_token=pe.stride(0),
            v_token=v.stride(0),
            v_head=v.stride(1),
            HEADS=heads,
            NOPE=width,
            ROPE=pe.shape[2],
            VALUE=v.shape[2],
            BLOCKS=blocks,
            BLOCK=BLOCK,
            E4M3=call.k_out.dtype == E4M3,
            HARDWARE=gpu.supports_e4m3(device),
            PDL=pdl,
            num_warps=WARPS,
        )
