"""Products of few rows on the CPU: who takes them, and the call of their loops."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cairn.ops import cpu
from cairn.ops.cpu import avx512
from cairn.ops.linear import loops
from cairn.ops.linear.tuning import TUNING

MOST_ROWS = {torch.float32: 16, torch.bfloat16: 4, torch.float16: 2}
"""For more the library's product is faster: so on two cores of an Intel Xeon with AMX."""


def accepts(input: Tensor, weight: Tensor) -> bool:
    """Whether the loops take a product of input [..., K] with weight [N, K]."""
    width = weight.shape[1]
    return (
        0 < input.numel() <= MOST_ROWS.get(input.dtype, 0) * width
        and weight.numel() > 0
        and weight.is_contiguous()
    )


def multiply(
    input: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    add: bool = False,
    gated: bool = False,
) -> Tensor:
    """rmsnorm(input) @ weight.T + bias, in float32, rounded once.

    Args:
        input: [..., K]; weight: [N, K]; as `accepts` says.
        out: [..., N], contiguous, written; gated: [..., N / 2], silu of the first half times the
            second.
        bias: [N] of input's dtype.
        norm: weight [K] and eps of the norm.
        add: to what is in `out`.
    Returns:
        out.
    """
    weights, eps = (None, 0.0) if norm is None else norm
    loops.multiply(
        cpu.numbers(input.reshape(-1, input.shape[-1]).contiguous()),
        cpu.numbers(weight),
        cpu.numbers_or_none(bias, input.dtype, 1),
        cpu.numbers_or_none(weights, input.dtype, 1),
        np.float32(eps),
        cpu.numbers(out.view(-1, out.shape[-1])),
        add,
        gated,
        input.dtype == torch.bfloat16 and avx512.PAIRS,
        max(torch.get_num_threads(), weight.nbytes // TUNING.cpu_part_bytes),
    )
    return out
