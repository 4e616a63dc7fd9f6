"""Launches of the kernels of groups and of the largest magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.pdl import uses_pdl
from cairn.ops.quantization.codes import E4M3_MAX
from cairn.ops.quantization.kernels import amax_kernel, groups_kernel

TILES = (1024, 4096)
"""Elements per program, unless a group has more: for inputs of fewer than MANY elements, and for
larger ones."""
MANY = 1 << 21
NUMBERS_A_WARP = 512
WIDEST = 1 << 15
"""Most elements of a group."""
MAX_GROUPS = 1 << 30
ROUNDED = {"enable_fp_fusion": False}
"""Launch option of kernels that need products rounded before they are added: no FMA."""
AMAX_BLOCK, AMAX_WARPS = 4096, 8
"""Elements per program and iteration for the largest magnitude, and its warps."""
MAX_PARTS = 512
ONE_PROGRAM = 1 << 14
"""Elements of a tensor of which one program finds the largest magnitude."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a value is quantized.

    Attributes:
        low, high: of the codes; the largest magnitude of a group becomes `high`.
        rounding: "e4m3"; or to int8 "nearest" or "truncate".
        eps: lower bound of a group's largest magnitude.
        inverse: multiply by 1 / scale, do not divide.
        power: scales are powers of two.
        gated: rows are [gate | up], and silu(gate) * up is quantized.
    """

    low: float
    high: float
    rounding: str
    eps: float = 0.0
    inverse: bool = False
    power: bool = False
    gated: bool = False


def accepts(input: Tensor, output_q: Tensor, group: int, masked_m: Tensor | None = None) -> bool:
    """Rows that the kernel takes."""
    near = input.stride(-1) == 1 and output_q.is_contiguous()
    mask = masked_m is None or masked_m.is_contiguous()
    few = output_q.numel() < group * MAX_GROUPS
    return near and mask and few and input.dim() in (2, 3) and 0 < group <= WIDEST


def quantize(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group: int,
    rule: Rule,
    masked_m: Tensor | None = None,
) -> None:
    """Write the codes and scales of every group.

    Args:
        input: [T, K] or [E, T, K], 2K if gated.
        output_q: the same, contiguous, of 8 bits.
        output_s: [.., T, K / group] float32, or int32 [.., T, ceil(K / group / 4)] for exponents;
            any strides.
        group: elements of a group.
        masked_m: [E] int32, rows in use; None: all.
    """
    rows, width = output_q.shape[-2:]
    per_row = width // group
    packed = output_s.dtype == torch.int32
    columns = -(-per_row // 4) * 4 if packed else per_row
    experts = output_q.dim() == 3
    total = output_q.shape[0] * rows if experts else rows
    if not total * columns:
        return
    block = gpu.next_power_of_2(group)
    lines = max(1, TILES[total * columns * block >= MANY] // block)
    tile = math.gcd(columns, lines)
    tiles = columns // tile
    programs = tiles * -(-total * tile // lines)
    warps = max(1, min(16, lines * block // NUMBERS_A_WARP))
    hardware = gpu.supports_e4m3(input.device)
    e4m3 = rule.rounding == "e4m3" and (rule.low, rule.high) == (-E4M3_MAX, E4M3_MAX)
    pdl = uses_pdl(input.device, 1, programs * warps)
    groups_kernel[(programs,)](
        x=input,
        q=output_q.view(torch.uint8),
        scale=output_s,
        masked_m=masked_m,
        total=total,
        tiles=tiles,
        per_row=per_row,
        rows=rows if experts else None,
        width=group,
        x_expert=input.stride(0) if experts else 0,
        x_row=input.stride(-2),
        s_expert=output_s.stride(0) if experts else 0,
        s_row=output_s.stride(-2),
        s_group=output_s.stride(-1),
        eps=rule.eps,
        low=rule.low,
        high=rule.high,
        T=lines,
        TILE=tile,
        WP=block,
        ROUNDING=rule.rounding,
        INVERSE=rule.inverse,
        CLAMPED=not (hardware and e4m3),
        GATED=rule.gated,
        POWER=rule.power,
        PACKED=packed,
        HARDWARE=hardware,
        PDL=pdl,
        num_warps=warps,
        **ROUNDED,
    )


def amax_parts(x: Tensor) -> Tensor:
    """Bits [at most MAX_PARTS] int32 of magnitudes, the largest of which is that of x.

    Args:
        x: contiguous, float32, bfloat16 or float16.
    """
    count = x.numel()
    programs = min(max(1, -(-count // AMAX_BLOCK)), MAX_PARTS)
    parts = gpu.empty((programs,), torch.int32, x.device)
    pdl = uses_pdl(x.device, 1, programs * AMAX_WARPS)
    amax_kernel[(programs,)](
        x=x,
        parts=parts,
        count=count,
        BLOCK=AMAX_BLOCK,
        PDL=pdl,
        num_warps=AMAX_WARPS,
    )
    return parts
