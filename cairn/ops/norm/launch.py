"""Argument checks and kernel launches shared by the norms."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.norm.kernels import fused_add_rmsnorm_kernel, lengths_kernel, rmsnorm_kernel
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import Op

LONGEST = 1 << 15
"""Elements of the longest row that one program takes."""
PROGRAM = 2048
"""Elements per program for short rows, several of which share a program."""


def check_rows(op: str, input: Tensor, weight: Tensor, out: Tensor | None = None) -> None:
    """Raise BadArgument unless input [..., H], weight [H] and out have consistent shapes, dtypes
    and devices."""
    check_input(op, input)
    check_weight(op, "weight", weight, input)
    if out is not None:
        expect(op, "out", out, input.shape, (input.dtype,), like=input)


def check_input(op: str, input: Tensor) -> None:
    """Raise BadArgument unless input is [..., H] of floating-point numbers."""
    expect(op, "input", input, dtypes=FLOATS)
    if input.dim() == 0 or input.shape[-1] == 0:
        refuse(op, "input", f"has shape {list(input.shape)}, not [..., H] with H > 0")


def check_weight(op: str, name: str, weight: Tensor, input: Tensor) -> None:
    """Raise BadArgument unless weight [H] fits input [..., H]."""
    dtypes = (input.dtype, torch.float32)
    expect(op, name, weight, input.shape[-1:], dtypes, like=input, dense=1)


def check_sum(op: str, input: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raise BadArgument unless input and residual [..., H] can be added, and weight [H] fits."""
    check_rows(op, input, weight)
    expect(op, "residual", residual, input.shape, (input.dtype,), like=input)


def rows_of(x: Tensor) -> Tensor | None:
    """x [..., H] as [rows, H] in the same memory, the stride of H being 1; or None."""
    if x.stride(-1) != 1 or x.shape[-1] > LONGEST:
        return None
    if x.dim() == 2:
        return x
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None


def in_rows(call: Call) -> bool:
    """Rows with contiguous elements, short enough for one program."""
    return call.input.stride(-1) == 1 and call.input.shape[-1] <= LONGEST


def both_in_rows(call: Call) -> bool:
    """The same for input and residual, where both are matrices in memory, so that they are changed
    in place without copies."""
    return rows_of(call.input) is not None and rows_of(call.residual) is not None


def fuses_add_norm(x: Tensor) -> bool:
    """Whether adding rows x to the residual stream and normalizing the sum is one kernel."""
    return gpu.AVAILABLE and x.is_cuda


def register_rows(op: Op[..., Tensor], *, shifted: bool = False, rounded: bool = False) -> None:
    """Register the check and the kernel of a norm of rows (input, weight, eps, out).

    shifted: the stored weight is the weight - 1. rounded: also round before the product with the
    weight.
    """
    op.check(lambda call: check_rows(op.name, call.input, call.weight, call.out))

    @op.implementation("triton", devices=gpu.DEVICES, when=in_rows, replayed=True)
    def _(call: Call) -> Tensor:
        return _norm_rows(call, shifted, rounded)


def register_sums(op: Op[..., None], *, shifted: bool = False) -> None:
    """The same for a norm of a sum, in place (input, residual, weight, eps)."""
    op.check(lambda call: check_sum(op.name, call.input, call.residual, call.weight))

    @op.implementation("triton", devices=gpu.DEVICES, when=both_in_rows, replayed=True)
    def _(call: Call) -> None:
        _norm_sums(call, shifted)


def _norm_rows(call: Call, shifted: bool, rounded: bool) -> Tensor:
    """`rmsnorm_kernel` over input [..., H], into `out` where it lies in rows."""
    input, out = call.input, call.out
    width = input.shape[-1]
    x = input.reshape(-1, width)
    into = None if out is None else rows_of(out)
    result = out
    if into is None or result is None:
        result = gpu.empty(input.shape, input.dtype, input.device)
        into = result.view(-1, width)
    rows, block = x.shape[0], gpu.next_power_of_2(width)
    warps = gpu.warps_for(block)
    pdl = uses_pdl(input.device, rows, warps)
    if rows:
        rmsnorm_kernel[(rows,)](
            x=x,
            weight=call.weight,
            out=into,
            x_stride=x.stride(0),
            out_stride=into.stride(0),
            width=width,
            eps=call.eps,
            BLOCK=block,
            SHIFTED=shifted,
            ROUNDED=rounded,
            PDL=pdl,
            num_warps=warps,
        )
    typed: Tensor = result
    return typed


def _norm_sums(call: Call, shifted: bool) -> None:
    """`fused_add_rmsnorm_kernel` over what `rows_of` takes."""
    x, other = rows_of(call.input), rows_of(call.residual)
    assert x is not None and other is not None
    rows, width = x.shape
    block = gpu.next_power_of_2(width)
    warps = gpu.warps_for(block)
    pdl = uses_pdl(x.device, rows, warps)
    if rows:
        fused_add_rmsnorm_kernel[(rows,)](
            x=x,
            residual=other,
            weight=call.weight,
            x_stride=x.stride(0),
            residual_stride=other.stride(0),
            width=width,
            eps=call.eps,
            BLOCK=block,
            SHIFTED=shifted,
            PDL=pdl,
            num_warps=warps,
        )


def divide_by_lengths(
    input: Tensor,
    eps: float,
    mean: bool,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    shift: float = 0.0,
) -> Tensor:
    """`lengths_kernel` over input [..., H] and the gate, by the mean of squares or their sum.

    shift: added to the weight, in float32.
    """
    width = input.shape[-1]
    out = gpu.empty(input.shape, input.dtype, input.device)
    if not out.numel():
        return out
    x, z = heads_of(input), None if gate is None else heads_of(gate)
    rows, block = x.shape[0] * x.shape[1], gpu.next_power_of_2(width)
    side = max(1, min(PROGRAM // block, gpu.next_power_of_2(rows)))
    warps = min(8, max(1, side * block // 512))
    programs = -(-rows // side)
    lengths_kernel[(programs,)](
        x=x,
        weight=weight,
        gate=z,
        out=out,
        rows=rows,
        heads=x.shape[1],
        x_token=x.stride(0),
        x_head=x.stride(1),
        gate_token=0 if z is None else z.stride(0),
        gate_head=0 if z is None else z.stride(1),
        width=width,
        divisor=width if mean else 1,
        eps=eps,
        shift=shift,
        ROWS=side,
        BLOCK=block,
        PDL=uses_pdl(x.device, programs, warps),
        num_warps=warps,
    )
    return out


def heads_of(x: Tensor) -> Tensor:
    """x [..., H] as [tokens, heads, H], the stride of H being 1."""
    if x.dim() != 3:
        x = x.reshape(-1, 1, x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
