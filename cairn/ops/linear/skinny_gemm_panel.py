"""Launches of products of 17 to 128 tokens with the weights of a layer on a GPU.

For small weights cuBLAS spends more time at the start and end of a kernel than on the product.
These kernels prefetch their weight while the previous kernel still runs, and leave the sum over
split-K parts to the kernel of the next norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.linear import skinny_gemm, wgmma_launch
from cairn.ops.linear.kernels import panel_kernel, sum_norm_kernel
from cairn.ops.linear.tuning import TUNING
from cairn.ops.norm.launch import LONGEST

FEWEST, MOST = skinny_gemm.TILE_TOKENS + 1, 128
"""Tokens of these products."""
GATED_ROWS = SPLIT_ROWS = 64


def linear_fuses_norm(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the norm after a residual addition is fused with the product before it (which leaves
    split-K parts); otherwise it is fused with the next product."""
    return (
        FEWEST <= input.shape[0] <= MOST
        or skinny_gemm.accepts_split(input, weight)
        or (bias is None and wgmma_launch.sums_split(input, weight))
    )


def accepts(input: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether these kernels support tokens [T, K] and a weight [N, K]: contiguous rows, and a
    weight of a layer.

    The library is faster for float32, for weights that need more than one wave of programs, and
    without PDL.
    """
    return _takes(input, weight) and _rows(weight, gated) > 0


def accepts_split(input: Tensor, weight: Tensor) -> bool:
    """`accepts` for split-K."""
    outputs = weight.shape[0]
    return (
        _takes(input, weight)
        and outputs % SPLIT_ROWS == 0
        and outputs // SPLIT_ROWS <= TUNING.panel_programs
        and outputs <= LONGEST
    )


def _takes(input: Tensor, weight: Tensor) -> bool:
    return (
        input.dim() == 2
        and FEWEST <= input.shape[0] <= MOST
        and input.dtype == weight.dtype
        and (input.device.type != "cuda" or _is_quick(input))
        and input.stride(1) == 1
        and weight.is_contiguous()
        and weight.shape[1] % TUNING.panel_part == 0
        and weight.numel() * weight.element_size() <= TUNING.panel_max_bytes
        and _bytes(input) <= gpu.max_shared_memory(input.device)
    )


def _is_quick(input: Tensor) -> bool:
    """Whether these kernels are faster than cuBLAS on the device."""
    return input.dtype != torch.float32 and gpu.supports_pdl(input.device)


def _tokens(input: Tensor) -> int:
    return TUNING.panel_tokens if input.shape[0] <= TUNING.panel_tokens else 2 * TUNING.panel_tokens


def _bytes(input: Tensor) -> int:
    """Shared memory of a program's parts."""
    tokens = _tokens(input)
    part = 2 * TUNING.panel_part if tokens == TUNING.panel_tokens else TUNING.panel_part
    return TUNING.panel_stages * (tokens + max(TUNING.panel_rows)) * part * input.element_size()


def _rows(weight: Tensor, gated: bool) -> int:
    """Rows per program; 0 if too many programs would be needed."""
    outputs = weight.shape[0]
    fitting = (
        rows
        for rows in ((GATED_ROWS,) if gated else TUNING.panel_rows)
        if outputs % rows == 0 and outputs // rows <= TUNING.panel_programs
    )
    return next(fitting, 0)


def multiply(input: Tensor, weight: Tensor, out: Tensor, *, gated: bool = False) -> Tensor:
    """Write out [T, N]: the product or, if `gated`, silu of its first half times the second half;
    requires `accepts`."""
    _launch(input, weight, out, _rows(weight, gated), weight.shape[1], gated)
    return out


def multiply_parts(input: Tensor, weight: Tensor) -> Tensor:
    """Parts [splits, T, N] float32 whose sum is the product; requires `accepts_split`."""
    outputs, width = weight.shape
    splits = 1
    while (
        splits < TUNING.panel_max_splits
        and 2 * splits * outputs // SPLIT_ROWS <= TUNING.panel_programs
        and width % (2 * splits * TUNING.panel_part) == 0
        and width // (2 * splits * TUNING.panel_part) >= TUNING.panel_min_parts
    ):
        splits *= 2
    shape = (splits, input.shape[0], outputs)
    parts = gpu.empty(shape, torch.float32, input.device)
    _launch(input, weight, parts, SPLIT_ROWS, width // splits, False)
    return parts


def _launch(input: Tensor, weight: Tensor, out: Tensor, rows: int, span: int, gated: bool) -> None:
    """Launch `panel_kernel` with `rows` rows of the weight and `span` columns per program."""
    outputs, width = weight.shape
    tokens = _tokens(input)
    large = (
        tokens == TUNING.panel_tokens
        and span >= TUNING.panel_many_parts * TUNING.panel_part
        and span % (2 * TUNING.panel_part) == 0
    )
    part = 2 * TUNING.panel_part if large else TUNING.panel_part
    pdl = gpu.supports_pdl(input.device)
    lines = gpu.next_power_of_2(-(-span * weight.element_size() // 128))
    panel_kernel[(outputs // rows, width // span)](
        x=input,
        weight=weight,
        out=out,
        tokens=input.shape[0],
        outputs=outputs // 2 if gated else outputs,
        x_stride=input.stride(0),
        out_stride=out.stride(-2),
        WIDTH=width,
        SPAN=span,
        LINES=lines,
        TOKENS=tokens,
        ROWS=rows,
        PART=part,
        GATED=gated,
        SPLIT=out.dim() == 3,
        PRECISION="ieee" if input.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=tokens // 16,
        num_stages=min(TUNING.panel_stages, span // part + 1),
    )


def add(parts: Tensor, residual: Tensor) -> None:
    """residual [T, N] += the sum of parts [splits, T, N], in order."""
    _add(parts, residual, None, residual, 0.0)


def add_and_norm(parts: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
    """`add`, and the rmsnorm of the unrounded sum, [T, N]."""
    out = gpu.empty(residual.shape, residual.dtype, residual.device)
    _add(parts, residual, norm, out, eps)
    return out


def _add(parts: Tensor, residual: Tensor, norm: Tensor | None, out: Tensor, eps: float) -> None:
    splits, tokens, width = parts.shape
    block = gpu.next_power_of_2(width)
    sum_norm_kernel[(tokens,)](
        parts=parts,
        residual=residual,
        norm=norm,
        out=out,
        tokens=tokens,
        residual_stride=residual.stride(0),
        out_stride=out.stride(0),
        width=width,
        eps=eps,
        PARTS=splits,
        BLOCK=block,
        PDL=gpu.supports_pdl(residual.device),
        num_warps=min(16, 2 * gpu.warps_for(block)),
    )
