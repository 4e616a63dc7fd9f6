"""Conversion of GPTQ's and AWQ's 4-bit and 8-bit weights to Marlin's layout (Frantar et al.
2024)."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import INT32, INT64, expect, expect_within, refuse
from cairn.ops.registry import op
from cairn.ops.weight_only import packing
from cairn.ops.weight_only.packing import TILE_K, TILE_N, WORD

BITS = (4, 8)
INDEX = (*INT32, *INT64)


@op
def gptq_marlin_repack(
    b_q_weight: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int
) -> Tensor:
    """GPTQ's words in Marlin's layout (`cairn.ops.weight_only.packing`).

    Args:
        b_q_weight: [K * bits / 32, N] int32, packed along K.
        perm: [K] int32 or int64, the old row of each new row; empty: unchanged order.
        size_k, size_n: K and N, multiples of 16 and 64.
        num_bits: 4 or 8.
    Returns:
        [K / 16, N * bits / 2] int32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    codes = packing.unpack(b_q_weight, num_bits, 0)
    if perm.numel():
        codes = codes.index_select(0, perm.long())
    return packing.to_marlin(codes, num_bits)


@op
def awq_marlin_repack(b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    """AWQ's words in Marlin's layout (`cairn.ops.weight_only.packing`).

    Args:
        b_q_weight: [K, N * bits / 32] int32, with columns interleaved as in `awq_dequantize`.
        size_k, size_n: K and N, multiples of 16 and 64.
        num_bits: 4 or 8.
    Returns:
        [K / 16, N * bits / 2] int32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return packing.to_marlin(packing.unpack_awq(b_q_weight, num_bits), num_bits)


@op
def awq_marlin_moe_repack(
    b_q_weight: Tensor, perm: Tensor | None, size_k: int, size_n: int, num_bits: int
) -> Tensor:
    """`awq_marlin_repack` of each expert's matrix.

    Args:
        b_q_weight: [E, K, N * bits / 32] int32.
        perm: ignored.
        size_k, size_n, num_bits: as in `awq_marlin_repack`.
    Returns:
        [E, K / 16, N * bits / 2] int32.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return packing.to_marlin(packing.unpack_awq(b_q_weight, num_bits), num_bits)


def _check_sizes(name: str, call: Call) -> None:
    if call.num_bits not in BITS:
        refuse(name, "num_bits", f"is {call.num_bits}, not 4 or 8")
    for argument, size, unit in (("size_k", call.size_k, TILE_K), ("size_n", call.size_n, TILE_N)):
        if size < 1 or size % unit:
            refuse(name, argument, f"is {size}, not a positive multiple of {unit}")


@gptq_marlin_repack.check
def _(call: Call) -> None:
    name = "gptq_marlin_repack"
    _check_sizes(name, call)
    shape = (call.size_k * call.num_bits // WORD, call.size_n)
    expect(name, "b_q_weight", call.b_q_weight, shape, INT32)
    expect(name, "perm", call.perm, 1, INDEX, call.b_q_weight)
    if call.perm.numel():
        expect(name, "perm", call.perm, (call.size_k,), INDEX)
        expect_within(name, "perm", call.perm, call.size_k)


@awq_marlin_repack.check
def _(call: Call) -> None:
    name = "awq_marlin_repack"
    _check_sizes(name, call)
    shape = (call.size_k, call.size_n * call.num_bits // WORD)
    expect(name, "b_q_weight", call.b_q_weight, shape, INT32)


@awq_marlin_moe_repack.check
def _(call: Call) -> None:
    name = "awq_marlin_moe_repack"
    _check_sizes(name, call)
    shape = (None, call.size_k, call.size_n * call.num_bits // WORD)
    expect(name, "b_q_weight", call.b_q_weight, shape, INT32)
    if call.perm is not None:
        expect(name, "perm", call.perm, dtypes=INDEX, like=call.b_q_weight)
