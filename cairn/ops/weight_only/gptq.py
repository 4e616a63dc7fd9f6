"""Products with GPTQ's packed weights of 2, 3, 4 and 8 bits (Frantar et al. 2022)."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, INT64, expect, expect_within, refuse
from cairn.ops.registry import op
from cairn.ops.weight_only import packing

BITS = (2, 3, 4, 8)
INDEX = (*INT32, *INT64)


@op
def gptq_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_gptq_qzeros: Tensor,
    b_gptq_scales: Tensor,
    b_g_idx: Tensor,
    use_shuffle: bool,
    bit: int,
) -> Tensor:
    """a @ w in float32, rounded once, with w[k, n] = (q - (z + 1)) * s[g(k), n].

    Args:
        a: [M, K] float32, bfloat16 or float16.
        b_q_weight: [K * bit / 32, N] int32, packed along K.
        b_gptq_qzeros: [G, N * bit / 32] int32, packed along N; zero points minus 1.
        b_gptq_scales: [G, N] of a's dtype.
        b_g_idx: [K] int32 or int64, the group of each row; empty: row k has group k // (K / G).
            With use_shuffle, the row order given to `gptq_shuffle`; groups then refer to rows in
            the new order.
        use_shuffle: whether b_q_weight was rearranged by `gptq_shuffle`.
        bit: bits per weight: 2, 3, 4 or 8.
    Returns:
        [M, N] of a's dtype.
    Raises:
        BadArgument: for another shape, dtype or device, and on the CPU for a group out of range.
    """
    groups, width = b_gptq_scales.shape[0], a.shape[1]
    words = _in_order(b_q_weight, bit) if use_shuffle else b_q_weight
    at = packing.group_of(width, groups, None if use_shuffle else b_g_idx, a.device)
    codes, zeros = packing.unpack(words, bit, 0), packing.unpack(b_gptq_qzeros, bit, 1) + 1
    weight = (codes - zeros[at]).float() * b_gptq_scales.float()[at]
    x = a.float()
    if use_shuffle and b_g_idx.numel():
        x = x.index_select(1, b_g_idx.long())
    return (x @ weight).to(a.dtype)


@op(mutates=("q_weight",))
def gptq_shuffle(q_weight: Tensor, q_perm: Tensor, bit: int) -> None:
    """Sort rows by q_perm, then move the values of each word: those of even rows to its low half,
    those of odd rows to its high half (2 and 4 bits; with 3 and 8 they stay). In place.

    Args:
        q_weight: [K * bit / 32, N] int32, packed as `gptq_gemm` takes it; changed.
        q_perm: [K] int32 or int64, the old row of each new row; empty: unchanged order.
        bit: of a weight: 2, 3, 4 or 8.
    Raises:
        BadArgument: for another shape, dtype or device, and on the CPU for a row out of range.
    """
    codes = packing.unpack(q_weight, bit, 0)
    if q_perm.numel():
        codes = codes.index_select(0, q_perm.long())
    if bit in (2, 4):
        codes = packing.take_places(codes, _halves(bit), 0)
    q_weight.copy_(packing.pack(codes, bit, 0))


def _halves(bit: int) -> list[int]:
    """Order of the values in a word: the even ones, then the odd ones."""
    count = packing.WORD // bit
    return [*range(0, count, 2), *range(1, count, 2)]


def _in_order(words: Tensor, bit: int) -> Tensor:
    """Undo the reordering of values within words by `gptq_shuffle`."""
    if bit not in (2, 4):
        return words
    codes = packing.take_places(packing.unpack(words, bit, 0), packing.inverse(_halves(bit)), 0)
    return packing.pack(codes, bit, 0)


def _check_bits(name: str, bit: int) -> None:
    if bit not in BITS:
        refuse(name, "bit", f"is {bit}, not 2, 3, 4 or 8")


@gptq_gemm.check
def _(call: Call) -> None:
    name, a, bit = "gptq_gemm", call.a, call.bit
    _check_bits(name, bit)
    expect(name, "a", a, 2, FLOATS)
    width = a.shape[1]
    if width * bit % packing.WORD:
        refuse(name, "a", f"has {width} columns, which do not fill words of {bit} bits")
    expect(name, "b_q_weight", call.b_q_weight, (width * bit // packing.WORD, None), INT32, a)
    outputs = call.b_q_weight.shape[1]
    expect(name, "b_gptq_scales", call.b_gptq_scales, (None, outputs), (a.dtype,), a)
    groups = call.b_gptq_scales.shape[0]
    expect(name, "b_gptq_qzeros", call.b_gptq_qzeros, 2, INT32, a)
    if call.b_gptq_qzeros.shape != (groups, outputs * bit // packing.WORD):
        shape = list(call.b_gptq_qzeros.shape)
        refuse(name, "b_gptq_qzeros", f"has shape {shape} for {groups} groups of {outputs} columns")
    expect(name, "b_g_idx", call.b_g_idx, 1, INDEX, a)
    if call.b_g_idx.numel():
        expect(name, "b_g_idx", call.b_g_idx, (width,), INDEX, a)
        expect_within(name, "b_g_idx", call.b_g_idx, width if call.use_shuffle else groups)
    elif not groups or width % groups:
        refuse(name, "b_gptq_scales", f"has {groups} groups, which {width} is no multiple of")


@gptq_shuffle.check
def _(call: Call) -> None:
    name = "gptq_shuffle"
    _check_bits(name, call.bit)
    expect(name, "q_weight", call.q_weight, 2, INT32)
    expect(name, "q_perm", call.q_perm, 1, INDEX, call.q_weight)
    width = call.q_weight.shape[0] * packing.WORD // call.bit
    if call.q_weight.shape[0] * packing.WORD % call.bit:
        refuse(name, "q_weight", f"has {call.q_weight.shape[0]} rows, not whole runs of 3 bits")
    if call.q_perm.numel():
        expect(name, "q_perm", call.q_perm, (width,), INDEX, call.q_weight)
        expect_within(name, "q_perm", call.q_perm, width)
