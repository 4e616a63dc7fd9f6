"""Launch of the CPU loops for products of few rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu
from cairn.ops.cpu import avx512
from cairn.ops.linear import loops
from cairn.ops.linear.skinny_gemm import Around
from cairn.ops.linear.tuning import TUNING

MAX_ROWS = {torch.float32: 16, torch.bfloat16: 4, torch.float16: 2}
"""Most rows for the loops, by dtype: with more, the library's product is faster (measured on two
cores of an Intel Xeon with AMX)."""


def accepts(input: Tensor, weight: Tensor) -> bool:
    """Whether the loops support a product of input [..., K] with weight [N, K]."""
    width = weight.shape[1]
    return (
        0 < input.numel() <= MAX_ROWS.get(input.dtype, 0) * width
        and weight.numel() > 0
        and weight.is_contiguous()
    )


def multiply(input: Tensor, weight: Tensor, out: Tensor, around: Around) -> Tensor:
    """Write out [..., N], contiguous, and return it; input [..., K] and weight [N, K] are as
    `accepts` says. Products are in float32, rounded once."""
    loops.multiply(
        cpu.as_array(input.reshape(-1, input.shape[-1]).contiguous()),
        cpu.as_array(weight),
        cpu.array_or_empty(around.bias, input.dtype, 1),
        cpu.array_or_empty(around.norm, input.dtype, 1),
        np.float32(around.eps),
        cpu.as_array(out.view(-1, out.shape[-1])),
        around.add,
        around.gated,
        input.dtype == torch.bfloat16 and avx512.PAIRS,
        max(torch.get_num_threads(), weight.nbytes // TUNING.cpu_part_bytes),
    )
    return out
