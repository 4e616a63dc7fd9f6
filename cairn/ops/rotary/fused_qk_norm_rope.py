"""RMS norm of every query and key head and rotary embedding, in place in a fused QKV projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, refuse
from cairn.ops.norm.launch import check_weight
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.pdl import pdl_option, uses_pdl
from cairn.ops.registry import op
from cairn.ops.rotary import launch
from cairn.ops.rotary.kernels import qk_norm_rope_kernel

NAME = "fused_qk_norm_rope"
AT_ONCE, WARPS = 8, 4
"""Heads per iteration of a program, and its warps."""
MANY_TOKENS = 512
"""From this many tokens on, one program processes all heads of a token."""
MIN_RAMP = 0.001
"""Width of YaRN's ramp where `low` equals `high`."""


@op(mutates=("qkv",))
def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    base: float,
    is_neox: bool,
    position_ids: Tensor,
    factor: float,
    low: float,
    high: float,
    attention_factor: float,
    rotary_dim: int | None = None,
) -> None:
    """rmsnorm of every head of q and k, then rotary embedding of its first elements, in place.

    In float32, rounded once at the end. Pair i turns by position * f_i, f_i = base^(-2i / rd); with
    factor != 1 by YaRN's (Peng et al. 2023, section 3.2) f_i * (ramp / factor + 1 - ramp), ramp =
    clamp((i - low) / (high - low), 0, 1).

    Args:
        qkv: [T, (nq + nk + nv) * d] float32, bfloat16 or float16, changed; rows may be strided.
        num_heads_q, num_heads_k, num_heads_v, head_dim: nq, nk, nv, d.
        eps: added to the mean square.
        q_weight, k_weight: [d], both qkv's dtype or both float32.
        base: of the frequencies, often called theta.
        is_neox: number i is paired with i + rd / 2; otherwise 2i with 2i + 1.
        position_ids: [T] int32 or int64.
        factor, low, high: of YaRN; factor 1: none.
        attention_factor: the rotated elements are multiplied by it.
        rotary_dim: rd, even; None: d.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    pair = torch.arange(rotary // 2, device=qkv.device)
    frequency = (float(base) ** (pair.double() * -2 / rotary)).float()
    if factor != 1:
        ramp = ((pair.float() - low) / (_end(low, high) - low)).clamp(0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
    angle = position_ids.float()[:, None] * frequency
    cos, sin = angle.cos() * attention_factor, angle.sin() * attention_factor
    heads = qkv[:, : (num_heads_q + num_heads_k) * head_dim].unflatten(-1, (-1, head_dim))
    for part, weight in (
        (heads[:, :num_heads_q], q_weight),
        (heads[:, num_heads_q:], k_weight),
    ):
        normed = rmsnorm.reference(part.float(), weight, eps)
        launch.rotate(normed, cos, sin, head_dim, is_neox)
        part.copy_(normed)


def _end(low: float, high: float) -> float:
    return high if abs(high - low) > 1e-6 else low + MIN_RAMP


@fused_qk_norm_rope.check
def _(call: Call) -> None:
    heads = call.num_heads_q + call.num_heads_k + call.num_heads_v
    if call.head_dim < 2 or call.head_dim % 2:
        refuse(NAME, "head_dim", f"is {call.head_dim}, not an even number")
    rotary = call.head_dim if call.rotary_dim is None else call.rotary_dim
    if rotary < 2 or rotary % 2 or rotary > call.head_dim:
        refuse(
            NAME, "rotary_dim", f"is {call.rotary_dim}, not an even number up to {call.head_dim}"
        )
    expect(NAME, "qkv", call.qkv, (None, heads * call.head_dim), FLOATS)
    check_weight(NAME, "q_weight", call.q_weight, call.qkv[:, : call.head_dim])
    expect(
        NAME,
        "k_weight",
        call.k_weight,
        (call.head_dim,),
        (call.q_weight.dtype,),
        like=call.qkv,
        dense=1,
    )
    expect(NAME, "position_ids", call.position_ids, call.qkv.shape[:1], INDICES, like=call.qkv)


def _rows(call: Call) -> bool:
    return call.qkv.stride(1) == 1 and call.position_ids.is_contiguous()


@fused_qk_norm_rope.implementation("triton", devices=gpu.DEVICES, when=_rows, replayed=True)
def _(call: Call) -> None:
    tokens, heads = call.qkv.shape[0], call.num_heads_q + call.num_heads_k
    rotary = call.head_dim if call.rotary_dim is None else call.rotary_dim
    rest = gpu.next_power_of_2(call.head_dim - rotary) if rotary < call.head_dim else 0
    at_once = min(AT_ONCE, gpu.next_power_of_2(max(1, heads)))
    groups = 1 if tokens >= MANY_TOKENS else -(-heads // at_once)
    pdl = uses_pdl(call.qkv.device, tokens, groups * WARPS)
    if tokens and heads:
        qk_norm_rope_kernel[(tokens * groups,)](
            qkv=call.qkv,
            positions=call.position_ids,
            q_weight=call.q_weight,
            k_weight=call.k_weight,
            stride=call.qkv.stride(0),
            q_heads=call.num_heads_q,
            heads=heads,
            dim=call.head_dim,
            eps=call.eps,
            factor=float(call.factor),
            low=float(call.low),
            high=float(_end(call.low, call.high)),
            attention_factor=float(call.attention_factor),
            HALF=rotary // 2,
            HP=gpu.next_power_of_2(rotary // 2),
            RP=rest,
            GROUPS=groups,
            HEADS=at_once,
            NEOX=call.is_neox,
            SCALED=call.factor != 1,
            LOG2_BASE=math.log2(call.base),
            PDL=pdl,
            num_warps=WARPS,
            **pdl_option(pdl),
        )
