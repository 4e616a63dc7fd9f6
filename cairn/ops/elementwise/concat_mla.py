"""Concatenation of the two parts of MLA heads, without and with rotary position."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.elementwise.fp8 import KINDS
from cairn.ops.elementwise.kernels import concat_kernel
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

FEW_TOKENS = 64
BLOCK, WARPS = 2048, 4
"""Elements and warps per program."""
FEW_BLOCK, FEW_WARPS = 2048, 8
"""The same for few tokens."""


@op(mutates=("k",))
def concat_mla_k(k: Tensor, k_nope: Tensor, k_rope: Tensor) -> None:
    """k[t, h] = [k_nope[t, h] | k_rope[t, 0]] for every head, in place.

    Args:
        k: [T, H, dn + dr] float32, bfloat16, float16 or float8, changed; tokens and heads may be
            strided.
        k_nope: [T, H, dn], k's dtype, may be strided.
        k_rope: [T, 1, dr], k's dtype, may be strided.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    width = k_nope.shape[2]
    k[..., :width] = k_nope
    k[..., width:] = k_rope


@concat_mla_k.check
def _(call: Call) -> None:
    name = "concat_mla_k"
    expect(name, "k", call.k, (None, None, None), (*FLOATS, *KINDS))
    expect(name, "k_nope", call.k_nope, (*call.k.shape[:2], None), (call.k.dtype,), like=call.k)
    expect(name, "k_rope", call.k_rope, (call.k.shape[0], 1, None), (call.k.dtype,), like=call.k)
    if call.k_nope.shape[2] + call.k_rope.shape[2] != call.k.shape[2]:
        parts = f"{call.k_nope.shape[2]} + {call.k_rope.shape[2]}"
        refuse(name, "k", f"has {call.k.shape[2]} numbers a head, not {parts}")


def _launch(first: Tensor, second: Tensor, out: Tensor) -> None:
    """out [T, H, d1 + d2] = [first | second]; `second` may have one head for all."""
    tokens, heads, _ = out.shape
    elements = heads * out.shape[2]
    shared = second.shape[1] == 1
    block, warps = (FEW_BLOCK, FEW_WARPS) if tokens < FEW_TOKENS else (BLOCK, WARPS)
    parts = -(-elements // block)
    pdl = uses_pdl(out.device, tokens, parts * warps)
    if out.numel():
        concat_kernel[(tokens * parts,)](
            first=first,
            second=second,
            out=out,
            elements=elements,
            first_stride=first.stride(0),
            first_head_stride=first.stride(1),
            second_stride=second.stride(0),
            second_head_stride=0 if shared else second.stride(1),
            out_stride=out.stride(0),
            out_head_stride=out.stride(1),
            FIRST=first.shape[2],
            SECOND=second.shape[2],
            PARTS=parts,
            BLOCK=block,
            PDL=pdl,
            num_warps=warps,
        )


@concat_mla_k.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: (
        call.k.stride(2) == call.k_nope.stride(2) == call.k_rope.stride(2) == 1
        and gpu.within_32_bits(call.k, call.k_nope)
    ),
    replayed=True,
)
def _(call: Call) -> None:
    # Not every device that runs these kernels supports float8: it is copied as bytes.
    parts = (call.k_nope, call.k_rope, call.k)
    _launch(*(x.view(torch.uint8) if x.dtype in KINDS else x for x in parts))


@op
def concat_mla_absorb_q(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """[a | b] along the last dim.

    Args:
        a: [..., d1] float32, bfloat16 or float16, may be strided.
        b: [..., d2], a's dtype and leading shape.
        out: [..., d1 + d2] of a's dtype, written and returned if given.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return torch.cat((a, b), dim=-1)


@concat_mla_absorb_q.check
def _(call: Call) -> None:
    name = "concat_mla_absorb_q"
    expect(name, "a", call.a, dtypes=FLOATS)
    if call.a.dim() == 0:
        refuse(name, "a", "has no dims")
    expect(name, "b", call.b, (*call.a.shape[:-1], None), (call.a.dtype,), like=call.a)
    if call.out is not None:
        shape = (*call.a.shape[:-1], call.a.shape[-1] + call.b.shape[-1])
        expect(name, "out", call.out, shape, (call.a.dtype,), like=call.a)


def _as_heads(x: Tensor) -> Tensor | None:
    """x [..., d] as [T, H, d] in the same memory, or None."""
    if x.stride(-1) != 1 or x.numel() == 0:
        return None
    if x.dim() != 3:
        try:
            x = x.view(-1, x.shape[-2] if x.dim() > 1 else 1, x.shape[-1])
        except RuntimeError:
            return None
    return x if gpu.within_32_bits(x) else None


def _in_rows(call: Call) -> bool:
    return _as_heads(call.a) is not None and _as_heads(call.b) is not None


@concat_mla_absorb_q.implementation("triton", devices=gpu.DEVICES, when=_in_rows, replayed=True)
def _(call: Call) -> Tensor:
    result, into = call.out, None if call.out is None else _as_heads(call.out)
    if result is None or into is None:
        shape = (*call.a.shape[:-1], call.a.shape[-1] + call.b.shape[-1])
        result = gpu.empty(shape, call.a.dtype, call.a.device)
        into = _as_heads(result)
    first, second = _as_heads(call.a), _as_heads(call.b)
    assert first is not None and second is not None and into is not None
    _launch(first, second, into)
    return result
