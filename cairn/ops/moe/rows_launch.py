"""Launches of the kernels that gather and sum rows."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.moe.kernels.rows import gather_rows_kernel, sum_rows_kernel
from cairn.ops.pdl import uses_pdl

MAX_ADDED = 64
"""Most rows per token that are summed."""
BLOCK, WARPS = 1024, 4
SUM_NUMBERS = 4096
"""Elements that a program loads at once: a range of columns of all rows of a token."""


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of x [R, width] with contiguous rows, and rows [N], contiguous."""
    width = x.shape[1]
    out = gpu.empty((rows.shape[0], width), x.dtype, x.device)
    if not out.numel():
        return out
    block = min(BLOCK, gpu.next_power_of_2(width))
    parts = -(-width // block)
    pdl = uses_pdl(x.device, rows.shape[0], parts * WARPS)
    gather_rows_kernel[(rows.shape[0] * parts,)](
        x=x,
        rows=rows,
        out=out,
        x_stride=x.stride(0),
        width=width,
        parts=parts,
        BLOCK=block,
        PDL=pdl,
        num_warps=WARPS,
    )
    return out


def fits(topk: int) -> bool:
    """Whether `sum_rows` can sum `topk` rows per token."""
    return topk <= MAX_ADDED


def adds(out: Tensor, topk: int, *vectors: Tensor | None) -> bool:
    """Whether `sum_rows` can write `out` from `topk` rows per token, given contiguous vectors."""
    dense = all(x is None or x.is_contiguous() for x in vectors)
    return dense and out.stride(1) == 1 and fits(topk)


def sum_rows(
    x: Tensor,
    out: Tensor,
    topk: int,
    factor: float = 1.0,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Launch `sum_rows_kernel` from x [R, H] into out [T, H]."""
    tokens, width = out.shape
    if not out.numel():
        return out
    padded = gpu.next_power_of_2(max(1, topk))
    block = max(32, min(gpu.next_power_of_2(width), SUM_NUMBERS // padded))
    parts = -(-width // block)
    pdl = uses_pdl(x.device, tokens, parts * WARPS)
    sum_rows_kernel[(tokens * parts,)](
        x=x,
        rows=rows,
        weights=weights,
        ids=ids,
        out=out,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        topk=topk,
        width=width,
        parts=parts,
        factor=float(factor),
        KP=padded,
        BLOCK=block,
        PDL=pdl,
        num_warps=WARPS,
    )
    return out
