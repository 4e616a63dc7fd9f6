"""Dequantisation of GGUF blocks, and products with them in which activations are not quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, INT32, expect, expect_within, refuse
from cairn.ops.gguf.blocks import KINDS, dequantised
from cairn.ops.moe.sorted_rows import experts_of
from cairn.ops.registry import Op, op

BYTES = (torch.uint8,)
MOE_BLOCK = 8
"""Rows per block of `ggml_moe_a8`."""
WITH_PRODUCT = range(2, 15)
"""Type ids that `ggml_moe_a8` supports."""


def ggml_moe_get_block_size(type: int) -> int:
    """Rows per block of `ggml_moe_a8` for a format: 8 for type ids 2 to 14, else 0."""
    return MOE_BLOCK if type in WITH_PRODUCT else 0


@op
def ggml_dequantize(
    weight: Tensor, quant_type: int, M: int, N: int, dtype: torch.dtype = torch.float16
) -> Tensor:
    """The dequantised weight, computed in float32, rounded once.

    Args:
        weight: [M, bytes of a row] uint8, or any other shape with as many bytes.
        quant_type: GGUF's type id of the format.
        M, N: rows, and elements of a row.
        dtype: float32, bfloat16 or float16.
    Returns:
        [M, N].
    Raises:
        BadArgument: for another shape, dtype or format.
        BadConfig: the format needs a grid and the package gguf is not installed.
    """
    kind = KINDS[quant_type]
    rows = weight.reshape(M, N // kind.elements * kind.bytes)
    return dequantised(rows, kind).to(dtype)


@op
def ggml_mul_mat_vec_a8(weight: Tensor, x: Tensor, quant_type: int, row: int) -> Tensor:
    """x @ w.T in float32, rounded once.

    Args:
        weight: [row, bytes of a row] uint8.
        x: [B, K] float32, bfloat16 or float16.
        quant_type: GGUF's type id of the format.
        row: rows of the weight.
    Returns:
        [B, row] of x's dtype.
    Raises:
        BadArgument: for another shape, dtype, device or format.
        BadConfig: a format of a grid without the package gguf.
    """
    return (x.float() @ dequantised(weight, KINDS[quant_type]).t()).to(x.dtype)


@op
def ggml_mul_mat_a8(weight: Tensor, x: Tensor, quant_type: int, row: int) -> Tensor:
    """The same as `ggml_mul_mat_vec_a8`, which sgl-kernel uses for few rows.

    Args:
        weight, x, quant_type, row: as in `ggml_mul_mat_vec_a8`.
    Raises:
        BadArgument: for another shape, dtype, device or format.
    """
    return (x.float() @ dequantised(weight, KINDS[quant_type]).t()).to(x.dtype)


@op
def ggml_moe_a8(
    input: Tensor,
    weight: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_token_post_padded: Tensor,
    type: int,
    row: int,
    topk: int,
    tokens: int,
) -> Tensor:
    """For each (token, expert) pair f: input[f // topk] @ w_e.T with its expert e, in float32,
    rounded once; 0 for pairs without an expert.

    Args:
        input: [T, K] float32, bfloat16 or float16.
        weight: [E, row, bytes of a row] uint8.
        sorted_token_ids, expert_ids, num_token_post_padded: results of `moe_align_block_size` for
            blocks of `ggml_moe_get_block_size` rows.
        type: GGUF's type id of the format, 2 to 14.
        row: rows of a matrix.
        topk: experts per token.
        tokens: T.
    Returns:
        [T * topk, row] of input's dtype.
    Raises:
        BadArgument: for another shape, dtype, device or format.
    """
    owner = experts_of(
        sorted_token_ids, expert_ids, num_token_post_padded, MOE_BLOCK, tokens * topk
    )
    return _grouped(input, weight, owner, type, topk)


@op
def ggml_moe_a8_vec(
    input: Tensor, weight: Tensor, topk_ids: Tensor, top_k: int, type: int, row: int, tokens: int
) -> Tensor:
    """`ggml_moe_a8` for (token, expert) pairs given by topk_ids, in any format.

    Args:
        input, weight, row, tokens: as in `ggml_moe_a8`.
        topk_ids: [T, top_k] int32 or int64; -1: no expert.
        top_k: experts per token.
        type: GGUF's type id of the format.
    Returns:
        [T * top_k, row] of input's dtype.
    Raises:
        BadArgument: for another shape, dtype, device or format.
        BadConfig: a format of a grid without the package gguf.
    """
    return _grouped(input, weight, topk_ids.flatten().long(), type, top_k)


def _grouped(input: Tensor, weight: Tensor, owner: Tensor, type: int, topk: int) -> Tensor:
    rows = input.float().repeat_interleave(topk, dim=0)
    out = torch.zeros(len(rows), weight.shape[1], dtype=torch.float32, device=input.device)
    for expert in range(weight.shape[0]):
        y = rows @ dequantised(weight[expert], KINDS[type]).t()
        out = torch.where((owner == expert).unsqueeze(1), y, out)
    return out.to(input.dtype)


def _expect_kind(name: str, argument: str, number: int) -> None:
    if number not in KINDS:
        known = ", ".join(f"{n} ({kind.name})" for n, kind in KINDS.items())
        refuse(name, argument, f"is {number}, not the number of a format: {known}")


def _expect_rows(name: str, row: int, own: int) -> None:
    if row != own:
        refuse(name, "row", f"is {row!r}, the weight has {own} rows")


def _row_bytes(name: str, argument: str, number: int, width: int) -> int:
    kind = KINDS[number]
    if width < 1 or width % kind.elements:
        told = f"has rows of {width} numbers, not whole blocks of {kind.elements} of {kind.name}"
        refuse(name, argument, told)
    return width // kind.elements * kind.bytes


@ggml_dequantize.check
def _(call: Call) -> None:
    name = "ggml_dequantize"
    _expect_kind(name, "quant_type", call.quant_type)
    expect(name, "weight", call.weight, dtypes=BYTES)
    if call.M < 0:
        refuse(name, "M", f"is {call.M}")
    size = _row_bytes(name, "N", call.quant_type, call.N)
    if call.weight.numel() != call.M * size:
        refuse(name, "weight", f"has {call.weight.numel()} bytes, not {call.M} rows of {size}")
    if call.dtype not in FLOATS:
        refuse(name, "dtype", f"is {call.dtype}, not float32, bfloat16 or float16")


@ggml_dequantize.fake
def _(call: Call) -> Tensor:
    return call.weight.new_empty((call.M, call.N), dtype=call.dtype)


def _register(own: Op[..., Tensor]) -> None:
    name = own.name

    @own.check
    def _(call: Call) -> None:
        _expect_kind(name, "quant_type", call.quant_type)
        expect(name, "x", call.x, 2, FLOATS)
        size = _row_bytes(name, "x", call.quant_type, call.x.shape[1])
        expect(name, "weight", call.weight, (None, size), BYTES, call.x)
        _expect_rows(name, call.row, call.weight.shape[0])

    @own.fake
    def _(call: Call) -> Tensor:
        return call.x.new_empty((call.x.shape[0], call.row))


_register(ggml_mul_mat_vec_a8)
_register(ggml_mul_mat_a8)


def _check_experts(name: str, call: Call, topk: int) -> None:
    _expect_kind(name, "type", call.type)
    expect(name, "input", call.input, 2, FLOATS)
    if call.tokens != call.input.shape[0]:
        refuse(name, "tokens", f"is {call.tokens!r}, `input` has {call.input.shape[0]} rows")
    size = _row_bytes(name, "input", call.type, call.input.shape[1])
    expect(name, "weight", call.weight, (None, None, size), BYTES, call.input)
    _expect_rows(name, call.row, call.weight.shape[1])
    if topk < 1:
        refuse(name, "topk" if name == "ggml_moe_a8" else "top_k", f"is {topk}, not 1 or more")


@ggml_moe_a8.check
def _(call: Call) -> None:
    name = "ggml_moe_a8"
    _check_experts(name, call, call.topk)
    if call.type not in WITH_PRODUCT:
        refuse(name, "type", f"is {call.type}, not 2 to 14: use ggml_moe_a8_vec")
    expect(name, "sorted_token_ids", call.sorted_token_ids, 1, INT32, call.input)
    expect(name, "expert_ids", call.expert_ids, 1, INT32, call.input)
    used = call.num_token_post_padded
    expect(name, "num_token_post_padded", used, (1,), INT32, call.input)


@ggml_moe_a8_vec.check
def _(call: Call) -> None:
    name = "ggml_moe_a8_vec"
    _check_experts(name, call, call.top_k)
    shape = (call.tokens, call.top_k)
    expect(name, "topk_ids", call.topk_ids, shape, INDICES, call.input)
    expect_within(name, "topk_ids", call.topk_ids, call.weight.shape[0], -1)


@ggml_moe_a8.fake
def _(call: Call) -> Tensor:
    return call.input.new_empty((call.tokens * call.topk, call.row))


@ggml_moe_a8_vec.fake
def _(call: Call) -> Tensor:
    return call.input.new_empty((call.tokens * call.top_k, call.row))
