"""Products with weights in Marlin's layout (Frantar et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, INT64, expect, expect_within, refuse
from cairn.ops.moe.sorted_rows import experts_of
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import op
from cairn.ops.weight_only import packing
from cairn.ops.weight_only.packing import TILE_K, TILE_N, WORD
from cairn.ops.weight_only.scalar_type import BY_ID, id_of, values_of

INDEX = (*INT32, *INT64)


@op
def marlin_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_scales: Tensor,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    b_q_type: int,
    is_zp_float: bool = False,
) -> Tensor:
    """a @ w in float32, rounded once; see `gptq_marlin_gemm`."""
    weight = dequantised(
        b_q_weight, b_scales, global_scale, b_zeros, g_idx, b_q_type, is_zp_float, a.shape[1]
    )
    x = a.float()
    if perm is not None and perm.numel():
        x = x.index_select(1, perm.long())
    return (x @ weight).to(a.dtype)


@op
def moe_marlin_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_bias_or_none: Tensor | None,
    b_scales: Tensor,
    global_scale_or_none: Tensor | None,
    b_zeros_or_none: Tensor | None,
    g_idx_or_none: Tensor | None,
    perm_or_none: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    topk_weights: Tensor | None,
    moe_block_size: int,
    top_k: int,
    b_q_type: int,
    is_zp_float: bool = False,
) -> Tensor:
    """`marlin_gemm` of each pair's row with its expert's weight; see `moe_wna16_marlin_gemm`."""
    places, outputs = a.shape[0] * top_k, b_scales.shape[-1]
    chosen = experts_of(
        sorted_token_ids, expert_ids, num_tokens_post_padded, moe_block_size, places
    )
    out = torch.zeros(places, outputs, dtype=torch.float32, device=a.device)
    given = (global_scale_or_none, b_zeros_or_none, g_idx_or_none, perm_or_none, b_bias_or_none)
    for expert in range(b_q_weight.shape[0]):
        scale, zeros, groups, order, bias = (
            None if x is None or not x.numel() else x[expert] for x in given
        )
        weight = dequantised(
            b_q_weight[expert], b_scales[expert], scale, zeros, groups, b_q_type, is_zp_float,
            a.shape[1],
        )  # fmt: skip
        x = a.float()
        y = (x if order is None else x.index_select(1, order.long())) @ weight
        y = y if bias is None else y + bias.float()
        own = (chosen == expert).unsqueeze(1)
        out = torch.where(own, y.repeat_interleave(top_k, dim=0), out)
    if topk_weights is not None:
        out = out * topk_weights.reshape(-1, 1).float()
    return out.to(a.dtype)


def dequantised(
    words: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    type_id: int,
    is_zp_float: bool,
    width: int,
) -> Tensor:
    """The matrix [K, N] float32 of what `gptq_marlin_gemm` takes, its rows as they are stored."""
    kind = BY_ID[type_id]
    codes = packing.from_marlin(words, kind.bits)
    groups = scales.shape[0]
    at = packing.group_of(width, groups, g_idx, words.device)
    if zeros is None:
        value = values_of(kind, codes)
    elif is_zp_float:
        value = codes.float() - packing.scales_from_marlin(zeros).float()[at]
    else:
        value = (codes - packing.zeros_from_marlin(zeros, kind.bits)[at]).float()
    scaled = value * packing.scales_from_marlin(scales.float())[at]
    return scaled if global_scale is None else scaled * global_scale.float().reshape(())


@marlin_gemm.front
def gptq_marlin_gemm(
    a: Tensor,
    c: Tensor | None,
    b_q_weight: Tensor,
    b_scales: Tensor,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    workspace: Tensor | None,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool = True,
    use_atomic_add: bool = False,
    use_fp32_reduce: bool = False,
    is_zp_float: bool = False,
) -> Tensor:
    """a @ w in float32, rounded once, of a weight in Marlin's layout.

    w = (q - bias) * s; with zero points (q - z) * s; of floating-point types value * s *
    global_scale. Layouts are those of `cairn.ops.weight_only.packing`.

    Args:
        a: [M, K] float32, bfloat16 or float16.
        c: [M, N] of a's dtype, written and returned if given.
        b_q_weight: [K / 16, N * bits / 2] int32.
        b_scales: [G, N] of a's dtype or float8_e4m3fn, permuted along N.
        global_scale: one float, or None.
        b_zeros: [G, N * bits / 32] int32, permuted and interleaved; with is_zp_float [G, N] of a's
            dtype, permuted as the scales; None or empty: none.
        g_idx, perm: [K] int32 or int64: the group of each stored row, ascending, and the column of
            a that it is multiplied with; None or empty: row k has group k // (K / G).
        b_q_type: the id of a weight type, or an object with an attribute `id`.
        size_m, size_n, size_k: M, N and K.
        workspace, is_k_full, use_atomic_add, use_fp32_reduce: ignored.
    Returns:
        [M, N] of a's dtype.
    Raises:
        BadArgument: for another shape, dtype, device or type.
    """
    name = "gptq_marlin_gemm"
    kind = id_of(name, b_q_type)
    _expect_sizes(name, a, size_m, size_n, size_k)
    zeros = None if b_zeros is None or not b_zeros.numel() else b_zeros
    out: Tensor = marlin_gemm(
        a, b_q_weight, b_scales, global_scale, zeros, g_idx, perm, kind, is_zp_float
    )
    if c is None:
        return out
    expect(name, "c", c, out.shape, (a.dtype,), a)
    return c.copy_(out)


@moe_marlin_gemm.front
def moe_wna16_marlin_gemm(
    a: Tensor,
    c_or_none: Tensor | None,
    b_q_weight: Tensor,
    b_bias_or_none: Tensor | None,
    b_scales: Tensor,
    global_scale_or_none: Tensor | None,
    b_zeros_or_none: Tensor | None,
    g_idx_or_none: Tensor | None,
    perm_or_none: Tensor | None,
    workspace: Tensor | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    topk_weights: Tensor | None,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    is_ep: bool,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool = True,
    use_atomic_add: bool = False,
    use_fp32_reduce: bool = False,
    is_zp_float: bool = False,
) -> Tensor:
    """(a[f // top_k] @ w_e + bias_e) * topk_weights[f] for every (token, expert) pair f and its
    expert e.

    Args:
        a: [M, K] float32, bfloat16 or float16.
        c_or_none: [M * top_k, N] of a's dtype, written and returned if given.
        b_q_weight, b_scales, global_scale_or_none, b_zeros_or_none, g_idx_or_none, perm_or_none: as
            in `gptq_marlin_gemm`, with the expert as first axis.
        b_bias_or_none: [E, N] of a's dtype, or None.
        sorted_token_ids, expert_ids, num_tokens_post_padded: results of `moe_align_block_size` for
            blocks of moe_block_size rows. Pairs of expert -1 give 0.
        topk_weights: [M, top_k] float32 or a's dtype; used with mul_topk_weights.
        size_m, size_n, size_k: M, N and K.
        workspace, is_ep, is_k_full, use_atomic_add, use_fp32_reduce: ignored.
    Returns:
        [M * top_k, N] of a's dtype.
    Raises:
        BadArgument: for another shape, dtype, device or type.
    """
    name = "moe_wna16_marlin_gemm"
    kind = id_of(name, b_q_type)
    _expect_sizes(name, a, size_m, size_n, size_k)
    zeros = None if b_zeros_or_none is None or not b_zeros_or_none.numel() else b_zeros_or_none
    out: Tensor = moe_marlin_gemm(
        a, b_q_weight, b_bias_or_none, b_scales, global_scale_or_none, zeros, g_idx_or_none,
        perm_or_none, sorted_token_ids, expert_ids, num_tokens_post_padded,
        topk_weights if mul_topk_weights else None, moe_block_size, top_k, kind, is_zp_float,
    )  # fmt: skip
    if c_or_none is None:
        return out
    expect(name, "c_or_none", c_or_none, out.shape, (a.dtype,), a)
    return c_or_none.copy_(out)


def _expect_sizes(name: str, a: Tensor, rows: int, outputs: int, width: int) -> None:
    """Raise BadArgument unless a is [size_m, size_k], and K and N have whole tiles."""
    expect(name, "a", a, 2, FLOATS)
    for argument, size, own in (("size_m", rows, a.shape[0]), ("size_k", width, a.shape[1])):
        if size != own:
            refuse(name, argument, f"is {size!r}, `a` has shape {list(a.shape)}")
    for argument, size, unit in (("size_k", width, TILE_K), ("size_n", outputs, TILE_N)):
        if not isinstance(size, int) or size < 1 or size % unit:
            refuse(name, argument, f"is {size!r}, not a positive multiple of {unit}")


def _check_weight(name: str, call: Call, lead: tuple[int | None, ...], ending: str = "") -> None:
    """Raise BadArgument unless weight, scales, zero points and order have the right shapes for a
    [M, K]; names of optional arguments have the suffix `ending`."""

    def optional(argument: str) -> Tensor | None:
        found: Tensor | None = getattr(call, argument + ending)
        return found

    expect(name, "a", call.a, 2, FLOATS)
    a, width = call.a, call.a.shape[1]
    if call.b_q_type not in BY_ID:
        refuse(name, "b_q_type", f"is {call.b_q_type}, not the number of a known type")
    bits = BY_ID[call.b_q_type].bits
    dtypes = (*FLOATS, E4M3)
    expect(name, "b_scales", call.b_scales, (*lead, None, None), dtypes, a)
    *front, groups, outputs = call.b_scales.shape
    if width % TILE_K or outputs % TILE_N:
        refuse(name, "b_scales", f"is of a weight [{width}, {outputs}], not whole tiles of 16 x 64")
    shape = (*front, width // TILE_K, outputs * bits // 2)
    expect(name, "b_q_weight", call.b_q_weight, shape, INT32, a)
    factor, zeros = optional("global_scale"), optional("b_zeros")
    if factor is not None:
        expect(name, f"global_scale{ending}", factor, dtypes=FLOATS, like=a)
        if factor.numel() != max(1, *front, 1):
            problem = f"has shape {list(factor.shape)}, not one number a weight"
            refuse(name, f"global_scale{ending}", problem)
    if zeros is not None:
        packed = (*front, groups, outputs if call.is_zp_float else outputs * bits // WORD)
        expect(name, f"b_zeros{ending}", zeros, packed, FLOATS if call.is_zp_float else INT32, a)
    for argument, end in (("g_idx", groups), ("perm", width)):
        order = optional(argument)
        if order is not None:
            expect(name, argument + ending, order, dtypes=INDEX, like=a)
        if order is not None and order.numel():
            expect(name, argument + ending, order, (*front, width))
            expect_within(name, argument + ending, order, end)
    by_row = optional("g_idx")
    if (by_row is None or not by_row.numel()) and (not groups or width % groups):
        refuse(name, "b_scales", f"has {groups} groups, which {width} is no multiple of")


@marlin_gemm.check
def _(call: Call) -> None:
    _check_weight("gptq_marlin_gemm", call, ())


@moe_marlin_gemm.check
def _(call: Call) -> None:
    name, a = "moe_wna16_marlin_gemm", call.a
    _check_weight(name, call, (None,), "_or_none")
    experts, _, outputs = call.b_scales.shape
    if call.b_bias_or_none is not None:
        expect(name, "b_bias_or_none", call.b_bias_or_none, (experts, outputs), (a.dtype,), a)
    expect(name, "sorted_token_ids", call.sorted_token_ids, 1, INT32, a)
    expect(name, "expert_ids", call.expert_ids, 1, INT32, a)
    expect(name, "num_tokens_post_padded", call.num_tokens_post_padded, (1,), INT32, a)
    for argument in ("moe_block_size", "top_k"):
        if getattr(call, argument) < 1:
            refuse(name, argument, f"is {getattr(call, argument)}, not 1 or more")
    if call.topk_weights is not None:
        dtypes = (torch.float32, a.dtype)
        expect(name, "topk_weights", call.topk_weights, dtypes=dtypes, like=a)
        if call.topk_weights.numel() != a.shape[0] * call.top_k:
            shape = list(call.topk_weights.shape)
            refuse(name, "topk_weights", f"has shape {shape}, not [{a.shape[0]}, {call.top_k}]")
