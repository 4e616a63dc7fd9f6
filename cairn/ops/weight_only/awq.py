"""Dequantisation of, and products with, AWQ's packed 4-bit weights (Lin et al. 2023)."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.registry import op
from cairn.ops.weight_only import packing

COLUMNS = 8
"""Columns per word."""


@op
def awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """(w - z) * s with the zero point z and scale s of each group of K / G rows, rounded once.

    Args:
        qweight: [K, N / 8] int32; column j of 8 is nibble (0, 4, 1, 5, 2, 6, 3, 7)[j] of a word.
        scales: [G, N] float32, bfloat16 or float16; K is a multiple of G.
        qzeros: [G, N / 8] int32, packed alike.
    Returns:
        [K, N] of scales' dtype.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return _values(qweight, scales, qzeros).to(scales.dtype)


@op
def awq_gemm(
    x: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor, split_k_iters: int = 1
) -> Tensor:
    """x @ awq_dequantize(qweight, scales, qzeros), in float32, rounded once.

    Args:
        x: [M, K] of scales' dtype.
        qweight, scales, qzeros: as in `awq_dequantize`.
        split_k_iters: ignored.
    Returns:
        [M, N] of x's dtype.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    weight = _values(qweight, scales, qzeros).to(scales.dtype)
    return (x.float() @ weight.float()).to(x.dtype)


def _values(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """The matrix [K, N] float32."""
    groups, rows = scales.shape[0], qweight.shape[0]
    at = packing.group_of(rows, groups, None, qweight.device)
    codes, zeros = packing.unpack_awq(qweight), packing.unpack_awq(qzeros)
    return (codes - zeros[at]).float() * scales.float()[at]


def _check(name: str, call: Call) -> None:
    expect(name, "qweight", call.qweight, 2, INT32)
    rows, words = call.qweight.shape
    expect(name, "scales", call.scales, (None, words * COLUMNS), FLOATS, call.qweight)
    groups = call.scales.shape[0]
    if not groups or rows % groups:
        refuse(name, "scales", f"has {groups} groups, which {rows} rows are no multiple of")
    expect(name, "qzeros", call.qzeros, (groups, words), INT32, call.qweight)


@awq_dequantize.check
def _(call: Call) -> None:
    _check("awq_dequantize", call)


@awq_gemm.check
def _(call: Call) -> None:
    _check("awq_gemm", call)
    shape = (None, call.qweight.shape[0])
    expect("awq_gemm", "x", call.x, shape, (call.scales.dtype,), call.qweight)
