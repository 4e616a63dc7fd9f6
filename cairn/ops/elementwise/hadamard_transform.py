"""The Walsh-Hadamard transform of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.elementwise.kernels import hadamard_kernel, hadamard_rows_kernel
from cairn.ops.registry import op

LEAST, NARROW, LONGEST = 16, 128, 1 << 14
"""Smallest size of a matrix product; longest rows of one product; longest rows of a program."""
ROWS, WARPS, PROGRAMS = 64, 4, 132 * 8
"""Rows per iteration of a program, its warps, and most programs: each loops over rows."""
STAGES, ON_THE_WAY = 3, 64 << 10
"""Most pipeline stages of a program of long rows, and most shared memory of them together."""
MEMORY = 192 << 10
"""Bytes of shared memory that the longest row takes."""


@op
def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """x padded with zeros to a power of two n, times H_n * scale, cut back; rounded once.

    H_n[i, j] = (-1)^(number of common 1 bits of i and j): Sylvester's order.

    Args:
        x: [..., d] float32, bfloat16 or float16, d > 0; rows may be strided.
        scale: the result is multiplied by it; n^-0.5 makes it a rotation.
    Raises:
        BadArgument: for another shape or dtype.
    """
    width = x.shape[-1]
    size = gpu.next_power_of_2(width)
    y = torch.nn.functional.pad(x.float(), (0, size - width))
    step = 1
    while step < size:
        first, second = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return (y[..., :width] * scale).to(x.dtype)


@hadamard_transform.check
def _(call: Call) -> None:
    expect("hadamard_transform", "x", call.x, dtypes=FLOATS)
    if call.x.dim() == 0 or call.x.shape[-1] == 0:
        refuse(
            "hadamard_transform", "x", f"has shape {list(call.x.shape)}, not [..., d] with d > 0"
        )


def _short(call: Call) -> bool:
    if call.x.stride(-1) != 1 or call.x.shape[-1] > LONGEST:
        return False
    return call.x.shape[-1] <= LONGEST // 2 or gpu.max_shared_memory(call.x.device) >= MEMORY


@hadamard_transform.implementation("triton", devices=gpu.DEVICES, when=_short, replayed=True)
def _(call: Call) -> Tensor:
    """By matrix products: H_ab of a row is H_a X H_b of the row as [a, b]."""
    width = call.x.shape[-1]
    source = call.x.reshape(-1, width)
    out = gpu.empty(call.x.shape, call.x.dtype, call.x.device)
    rows, size = source.shape[0], max(LEAST, gpu.next_power_of_2(width))
    if not rows:
        return out
    if size <= NARROW:
        hadamard_rows_kernel[(min(PROGRAMS, -(-rows // ROWS)),)](
            x=source,
            out=out,
            rows=rows,
            x_stride=source.stride(0),
            out_stride=width,
            width=width,
            scale=call.scale,
            ROWS=ROWS,
            N=size,
            num_warps=WARPS,
        )
        return out
    # Nearly square: the fewest products and the smallest matrices of signs.
    a_size = 1 << size.bit_length() // 2
    hadamard_kernel[(min(PROGRAMS, rows),)](
        x=source,
        out=out,
        rows=rows,
        x_stride=source.stride(0),
        out_stride=width,
        width=width,
        scale=call.scale,
        A=a_size,
        B=size // a_size,
        num_warps=WARPS if size <= 4096 else 2 * WARPS,
        num_stages=max(1, min(STAGES, ON_THE_WAY // (size * call.x.element_size()))),
    )
    return out


hadamard_transform.tolerance(
    {
        torch.float32: (1e-4, 2e-4),
        torch.float16: (5e-3, 5e-3),
        torch.bfloat16: (1.6e-2, 2e-2),
    },
    "sums of up to 2^14 numbers, in another order",
)
