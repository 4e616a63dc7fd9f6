"""Grouped products with experts' 4-bit or 8-bit matrices in the engine's layout."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.registry import op
from cairn.ops.weight_only import layout, packed_launch
from cairn.ops.weight_only.linear_packed import check_packed
from cairn.ops.weight_only.packed_launch import Packed

NAME = "experts_packed"


@op
def experts_packed(
    input: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    topk_ids: Tensor,
    share: int,
    e4m3: bool = False,
) -> Tensor:
    """For each (token, expert) pair f of topk_ids: row f // share of input times the matrix of its
    expert, in float32, rounded once; 0 for pairs without an expert.

    Args:
        input: [T * k / share, K] float32, bfloat16 or float16.
        words: [E, W, N] int32 in the layout of `cairn.ops.weight_only.layout`.
        scale: [E, G, N] float32; K is a multiple of G.
        zero: [E, G, N] int16; None: 2^(bits - 1).
        bits: 4 or 8.
        topk_ids: [T, k] int32 or int64; -1: no expert.
        share: pairs per row of input: k if rows are tokens, 1 if they are results of a first
            product.
        e4m3: 8-bit codes are float8 e4m3 values, without zero points.
    Returns:
        [T * k, N] of input's dtype.
    Raises:
        BadArgument: for another shape, dtype or device, and on the CPU for an expert out of range.
    """
    rows, owner = input.float().repeat_interleave(share, dim=0), topk_ids.flatten()
    out = torch.zeros(len(rows), words.shape[-1], dtype=torch.float32, device=input.device)
    for expert in range(words.shape[0]):
        own = None if zero is None else zero[expert]
        weight = layout.dequantised(words[expert], scale[expert], own, bits, input.shape[1], e4m3)
        out = torch.where((owner == expert).unsqueeze(1), rows @ weight.t(), out)
    return out.to(input.dtype)


@experts_packed.check
def _(call: Call) -> None:
    expect(NAME, "input", call.input, 2, FLOATS)
    expect(NAME, "words", call.words, 3)
    check_packed(NAME, call, call.input.shape[1], call.input)
    expect(NAME, "topk_ids", call.topk_ids, 2, INDICES, call.input)
    expect_within(NAME, "topk_ids", call.topk_ids, call.words.shape[0], -1)
    if call.share not in (1, call.topk_ids.shape[1]):
        refuse(NAME, "share", f"is {call.share}, neither 1 nor {call.topk_ids.shape[1]}")
    if call.input.shape[0] * call.share != call.topk_ids.numel():
        shape = list(call.input.shape)
        refuse(NAME, "input", f"has shape {shape} for {call.topk_ids.numel()} places")
    if call.e4m3 and (call.bits != 8 or call.zero is not None):
        refuse(NAME, "e4m3", f"is true for {call.bits} bits, or with zero points")


@experts_packed.fake
def _(call: Call) -> Tensor:
    return call.input.new_empty((call.topk_ids.numel(), call.words.shape[-1]))


def _packed(call: Call) -> Packed:
    given = (call.words, call.scale, call.zero, call.bits, call.input.shape[1], call.e4m3)
    return Packed(*given)


@experts_packed.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        packed_launch.multiplies(call.input, _packed(call), few=False)
        and call.topk_ids.is_contiguous()
        and call.topk_ids.shape[1] > 0
    ),
)
def _(call: Call) -> Tensor:
    shape = (call.topk_ids.numel(), call.words.shape[-1])
    out = gpu.empty(shape, call.input.dtype, call.input.device)
    weight = _packed(call)
    return packed_launch.multiply_experts(call.input, weight, call.topk_ids, call.share, out)


experts_packed.tolerance({torch.bfloat16: (1.6e-2, 2e-2)}, "products are added in another order")
