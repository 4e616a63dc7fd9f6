"""Root mean square normalisation of the heads of queries and keys, in place."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.norm.kernels import qknorm_kernel
from cairn.ops.norm.launch import check_weight
from cairn.ops.norm.rmsnorm import rmsnorm
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

NAME = "fused_inplace_qknorm"
NUMBERS, WARPS = 2048, 4
"""Warps per program."""


@op(mutates=("q", "k"))
def fused_inplace_qknorm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float = 1e-6,
    *,
    head_dim: int = 0,
) -> None:
    """rmsnorm of every head of q by q_weight and of k by k_weight, in place.

    Args:
        q: [T, nq, d] or [T, nq * d] float32, bfloat16 or float16; tokens and heads may be strided.
        k: [T, nk, d] or [T, nk * d] of q's dtype.
        q_weight, k_weight: [d], q's dtype or float32.
        eps: added to the mean square.
        head_dim: d; 0: the last dim of q.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    dim = head_dim or q.shape[-1]
    for x, weight in ((q, q_weight), (k, k_weight)):
        heads = _heads(x, dim)
        heads.copy_(rmsnorm.reference(heads, weight, eps))


def _heads(x: Tensor, dim: int) -> Tensor:
    """x as [T, n, d], in the same memory."""
    return x.unflatten(-1, (-1, dim)) if x.dim() == 2 else x


@fused_inplace_qknorm.check
def _(call: Call) -> None:
    dim = call.head_dim or (call.q.shape[-1] if call.q.dim() else 0)
    if dim < 1:
        refuse(NAME, "head_dim", f"is {dim}")
    for name, x in (("q", call.q), ("k", call.k)):
        expect(NAME, name, x, dtypes=FLOATS if x is call.q else (call.q.dtype,), like=call.q)
        flat = x.dim() == 2 and x.shape[-1] % dim == 0
        if x.shape[:1] != call.q.shape[:1] or not (flat or (x.dim() == 3 and x.shape[-1] == dim)):
            refuse(NAME, name, f"has shape {list(x.shape)}, not [T, n, {dim}] or [T, n * {dim}]")
    check_weight(NAME, "q_weight", call.q_weight, _heads(call.q, dim))
    check_weight(NAME, "k_weight", call.k_weight, _heads(call.k, dim))


def _dense(call: Call) -> bool:
    dim = call.head_dim or call.q.shape[-1]
    heads = _heads(call.q, dim), _heads(call.k, dim)
    return call.q.stride(-1) == call.k.stride(-1) == 1 and gpu.within_32_bits(*heads)


@fused_inplace_qknorm.implementation("triton", devices=gpu.DEVICES, when=_dense, replayed=True)
def _(call: Call) -> None:
    q, k = call.q, call.k
    dim = call.head_dim or q.shape[-1]
    q, k = _heads(q, dim), _heads(k, dim)
    tokens, q_heads, k_heads = q.shape[0], q.shape[1], k.shape[1]
    block = gpu.next_power_of_2(dim)
    most = max(1, NUMBERS // block)
    at_once = min(most, gpu.next_power_of_2(max(q_heads, k_heads)))
    programs = -(-q_heads // at_once) + -(-k_heads // at_once)
    pdl = uses_pdl(q.device, tokens, programs * WARPS)
    if tokens and programs:
        qknorm_kernel[(tokens * programs,)](
            q=q,
            k=k,
            q_weight=call.q_weight,
            k_weight=call.k_weight,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            k_stride=k.stride(0),
            k_head_stride=k.stride(1),
            q_heads=q_heads,
            k_heads=k_heads,
            width=dim,
            eps=call.eps,
            PROGRAMS=programs,
            HEADS=at_once,
            DIM=block,
            PDL=pdl,
            num_warps=WARPS,
        )
