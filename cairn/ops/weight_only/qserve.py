"""Products of int8 activations with 4-bit weights in QServe's layout (Lin et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import expect, refuse
from cairn.ops.registry import op

GROUP = 128
"""Elements per 8-bit scale."""
TILE = 32
"""Rows, and columns, of a tile of codes, and the period of the order of scales."""
INT8 = (torch.int8,)
HALF = (torch.float16,)


@op(aliases={"out_feats": "out"})
def qserve_w4a8_per_chn_gemm(
    in_feats: Tensor,
    kernel: Tensor,
    wscales: Tensor,
    ascales: Tensor,
    w_szs: Tensor,
    a_ssums: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """acc[m, n] * wscales[n] * ascales[m] - w_szs[n] * a_ssums[m] in float32, rounded once, where
    acc is the exact integer product of codes 0 .. 15 and in_feats.

    Bytes of `kernel` are [N / 32, K / 32, 8, 4, 2, 2, 4] = (n32, k32, n8, k4, half of k, half of n,
    k of 4): row 32 n32 + 16 nibble + 8 half of n + n8, column 32 k32 + 16 half of k + 4 k4 + k of
    4; the low nibble is 0.

    Args:
        in_feats: [M, K] int8; K a multiple of 32.
        kernel: [N, K / 2] int8; N a multiple of 32.
        wscales, w_szs: [N] float16: scale, and zero point times scale.
        ascales, a_ssums: [M] float16: scale, and sum of the row's values.
        out: [M, N] float16, written and returned if given; sgl-kernel also calls it `out_feats`.
    Returns:
        [M, N] float16.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    acc = _product(in_feats, _codes(kernel))
    scaled = acc * wscales.float() * ascales.float().unsqueeze(1)
    return (scaled - w_szs.float() * a_ssums.float().unsqueeze(1)).half()


@op(aliases={"out_feats": "out"})
def qserve_w4a8_per_group_gemm(
    in_feats: Tensor,
    kernel: Tensor,
    zeros: Tensor,
    scales_i8: Tensor,
    wscales: Tensor,
    ascales: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """acc[m, n] * wscales[n] * ascales[m] in float32, rounded once, where acc is the exact integer
    product of weights and in_feats; a weight is code * scale + zero of its group in int8
    arithmetic.

    Args:
        in_feats: [M, K] int8; K a multiple of 128.
        kernel: [N, K / 2] int8, as in `qserve_w4a8_per_chn_gemm`; N a multiple of 32.
        zeros, scales_i8: [K / 128, N] int8; of each 32 columns position 4 i + j is that of row
            8 j + i. A zero is - zero point * scale.
        wscales: [N] float16.
        ascales: [M] float16.
        out: [M, N] float16, written and returned if given; also called `out_feats`.
    Returns:
        [M, N] float16.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    scale, zero = (_by_group(x) for x in (scales_i8, zeros))
    weight = (_codes(kernel) * scale + zero).to(torch.int8).int()
    acc = _product(in_feats, weight)
    return (acc * wscales.float() * ascales.float().unsqueeze(1)).half()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] int8 times weight [N, K] int32, exact, as float32."""
    return (x.double() @ weight.double().t()).float()


def _codes(kernel: Tensor) -> Tensor:
    """[N, K] int32 of bytes [N, K / 2]."""
    rows, half = kernel.shape
    raw = kernel.view(torch.uint8).int().reshape(rows // TILE, 2 * half // TILE, 8, 4, 2, 2, 4)
    both = torch.stack((raw & 15, raw >> 4))
    # (nibble, n32, k32, n8, k4, half of k, half of n, k of 4)
    return both.permute(1, 0, 6, 3, 2, 5, 4, 7).reshape(rows, 2 * half)


def _by_group(stored: Tensor) -> Tensor:
    """[N, K] int32 of scales or zeros [K / 128, N]."""
    groups, rows = stored.shape
    laid = stored.int().reshape(groups, rows // TILE, 8, 4).transpose(2, 3).reshape(groups, rows)
    return laid.t().repeat_interleave(GROUP, dim=1)


def _check(name: str, call: Call, unit: int) -> None:
    x = call.in_feats
    expect(name, "in_feats", x, 2, INT8)
    rows, width = x.shape
    expect(name, "kernel", call.kernel, 2, INT8, x)
    outputs = call.kernel.shape[0]
    if width % unit or call.kernel.shape[1] * 2 != width:
        shape = list(call.kernel.shape)
        refuse(name, "kernel", f"has shape {shape} for {width} columns, a multiple of {unit}")
    if outputs % TILE:
        refuse(name, "kernel", f"has {outputs} rows, not a multiple of {TILE}")
    expect(name, "wscales", call.wscales, (outputs,), HALF, x)
    expect(name, "ascales", call.ascales, (rows,), HALF, x)
    if call.out is not None:
        expect(name, "out", call.out, (rows, outputs), HALF, x)


@qserve_w4a8_per_chn_gemm.check
def _(call: Call) -> None:
    name, x = "qserve_w4a8_per_chn_gemm", call.in_feats
    _check(name, call, TILE)
    expect(name, "w_szs", call.w_szs, (call.kernel.shape[0],), HALF, x)
    expect(name, "a_ssums", call.a_ssums, (x.shape[0],), HALF, x)


@qserve_w4a8_per_group_gemm.check
def _(call: Call) -> None:
    name, x = "qserve_w4a8_per_group_gemm", call.in_feats
    _check(name, call, GROUP)
    shape = (x.shape[1] // GROUP, call.kernel.shape[0])
    expect(name, "zeros", call.zeros, shape, INT8, x)
    expect(name, "scales_i8", call.scales_i8, shape, INT8, x)
