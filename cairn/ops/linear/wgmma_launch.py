"""Launches of products of some tokens with a large weight, by wgmma."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.linear.tuning import TUNING
from cairn.ops.linear.wgmma import linear_groups_kernel
from cairn.ops.norm.launch import LONGEST

OPTIONS: dict[str, Any] = {
    "dtypes": (torch.bfloat16, torch.float16),
    "missing": "" if gpu.gl else "needs Triton 3.6",
}
"""Registration options of implementations by these kernels."""
_ALIGNED = 16
"""Alignment in bytes of a table's address and row stride."""


def accepts(input: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether these kernels support tokens [T, K] and a large weight [N, K] with enough rows for
    the device."""
    if not _fits(input, weight):
        return False
    filled = TUNING.wgmma_wide_filled if _tokens(input) > 32 and not gated else TUNING.wgmma_filled
    enough = _programs(weight) >= filled * gpu.sm_count(input.device)
    return enough and _aligned(input, weight)


def sums_split(input: Tensor, weight: Tensor) -> bool:
    """`accepts_split`, except alignment."""
    return _fits(input, weight) and weight.shape[0] <= LONGEST


def accepts_split(input: Tensor, weight: Tensor) -> bool:
    """`accepts` for split-K, whose parts are summed by the next norm: weights of any number of rows
    up to the longest norm."""
    return sums_split(input, weight) and _aligned(input, weight)


def accepts_added(input: Tensor, weight: Tensor) -> bool:
    """`accepts_split` for a product that is only added, without a norm."""
    return (
        accepts_split(input, weight)
        and (_tokens(input) <= 32 or _bytes(weight) >= TUNING.wgmma_wide_split_bytes)
        and _splits(input, weight) > 1
    )


def _fits(input: Tensor, weight: Tensor) -> bool:
    size = weight.element_size()
    return (
        input.dim() == 2
        and TUNING.wgmma_min_tokens <= input.shape[0] <= TUNING.wgmma_max_tokens
        and input.dtype == weight.dtype
        and size == 2
        and gpu.supports_wgmma(input.device)
        and weight.is_contiguous()
        and _bytes(weight) >= TUNING.wgmma_min_bytes
        and weight.shape[1] * size % _ALIGNED == 0
        and input.stride(1) == 1
        and input.stride(0) >= input.shape[1]
        and input.stride(0) * size % _ALIGNED == 0
    )


def _aligned(input: Tensor, weight: Tensor) -> bool:
    return (input.data_ptr() | weight.data_ptr()) % _ALIGNED == 0


def _bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


def _programs(weight: Tensor) -> int:
    return -(-weight.shape[0] // (2 * TUNING.wgmma_rows))


def _tokens(input: Tensor) -> int:
    return max(16, gpu.next_power_of_2(input.shape[0]))


def _splits(input: Tensor, weight: Tensor) -> int:
    wanted = TUNING.wgmma_split_filled[_tokens(input)] * gpu.sm_count(input.device)
    most = -(-weight.shape[1] // TUNING.wgmma_part) // TUNING.wgmma_min_parts
    return max(1, min(math.ceil(wanted / _programs(weight)), most))


def multiply(input: Tensor, weight: Tensor, out: Tensor, *, gated: bool = False) -> Tensor:
    """Write out [T, N]: the product or, if `gated`, silu of its first half times the second half;
    requires `accepts`."""
    _launch(input, weight, out, 1, gated)
    return out


def multiply_parts(input: Tensor, weight: Tensor) -> Tensor:
    """Parts [splits, T, N] float32 whose sum is the product; requires `accepts_split`."""
    splits = _splits(input, weight)
    parts = gpu.empty((splits, input.shape[0], weight.shape[0]), torch.float32, input.device)
    _launch(input, weight, parts, splits, False)
    return parts


def _launch(input: Tensor, weight: Tensor, out: Tensor, splits: int, gated: bool) -> None:
    """Launch `linear_groups_kernel` with as many stages as fit into shared memory."""
    tokens, pdl = _tokens(input), gpu.supports_pdl(input.device)
    held = (2 * TUNING.wgmma_rows + tokens) * TUNING.wgmma_part * weight.element_size()
    stages = min(
        TUNING.wgmma_stages, (gpu.max_shared_memory(input.device) - TUNING.wgmma_spare) // held
    )
    linear_groups_kernel[(_programs(weight), splits)](
        x=_table(input, tokens),
        weight=_table(weight, TUNING.wgmma_rows),
        out=out,
        tokens=input.shape[0],
        outputs=out.shape[-1],
        out_stride=out.stride(-2),
        parts=-(-weight.shape[1] // TUNING.wgmma_part),
        ROWS=TUNING.wgmma_rows,
        TOKENS=tokens,
        PART=TUNING.wgmma_part,
        STAGES=stages,
        GATED=gated,
        SPLIT=out.dim() == 3,
        PDL=pdl,
        num_warps=4,
        maxnreg=TUNING.wgmma_registers,
    )


def _table(lines: Tensor, rows: int) -> object:
    block = (rows, TUNING.wgmma_part)
    return gpu.gluon_descriptor(
        gpu.tensor_descriptor(lines, lines.shape, lines.stride(), block), block
    )
