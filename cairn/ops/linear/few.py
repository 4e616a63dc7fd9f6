"""How the product of few tokens with a weight is launched on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.launch import early_option
from cairn.ops.linear.kernels import block_kernel, rows_kernel, tile_kernel

ROWS_TOKENS = 2
"""At most this many tokens pass by a program's rows one by one."""
TILE_TOKENS = 16
"""At most this many make one tile; more are left to the library's matrix products."""
BLOCK_TOKENS = 64
"""At most this many are one block of a head's product, which the library rounds and pads."""
BLOCK, PART, STAGES = 64, 64, 6
"""Rows of the weight in such a program, numbers of each that it takes at a time, and as many more
on their way."""
MOST_WIDTH = 1 << 14
THREAD_BYTES = 256
"""Of the weight, that a thread holds."""
SCRATCH_BYTES = 1 << 12
"""Of a program's memory, beside what it holds of weight and tokens."""
MANY_ROWS = 1 << 15
"""From this many numbers a token on, programs take more rows each."""


def accepts(input: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Few tokens [T, K] with their numbers side by side, and a plain weight [N, K].

    Several tokens' tile must fit in a program's memory beside the weight's rows, both rows of a
    pair if `gated`.
    """
    most = ROWS_TOKENS if input.element_size() > 2 else TILE_TOKENS
    return (
        input.dim() == 2
        and 0 < input.shape[0] <= most
        and input.dtype == weight.dtype
        and input.stride(1) == 1
        and weight.is_contiguous()
        and 16 <= weight.shape[1] <= MOST_WIDTH
        and (input.shape[0] <= ROWS_TOKENS or _fits(input, weight, gated))
    )


def _fits(input: Tensor, weight: Tensor, gated: bool) -> bool:
    rows = _tile_rows(weight.shape[0] // (1 + gated), gated) * (1 + gated)
    lines = rows + _tile_tokens(input.shape[0])
    line = gpu.next_power_of_2(weight.shape[1]) * weight.element_size()
    return lines * line + SCRATCH_BYTES <= gpu.program_memory(input.device)


def _tile_rows(numbers: int, gated: bool) -> int:
    return 32 if numbers >= MANY_ROWS else 16 if gated else 8


def _tile_tokens(tokens: int) -> int:
    return 8 if tokens <= 8 else 16


def multiply(
    input: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    *,
    gated: bool = False,
    add: bool = False,
) -> Tensor:
    """Write out [T, N], see `rows_kernel`; all that `accepts` asks for holds.

    Args:
        norm: weight and eps of the norm that the input goes through first.
        gated: silu of the first half of the numbers, times the second.
        add: to what is in out.
    """
    tokens, width = input.shape
    padded = gpu.next_power_of_2(width)
    numbers = weight.shape[0] // 2 if gated else weight.shape[0]
    early = gpu.launches_early(input.device)
    of_norm, eps = (weight, 0.0) if norm is None else norm
    given = (
        *(input, of_norm, weight, weight if bias is None else bias, out, tokens, numbers),
        *(input.stride(0), out.stride(0), eps, width, padded),
    )
    kinds = (norm is not None, gated, bias is not None, add, early)
    row_bytes = padded * weight.element_size() * (2 if gated else 1)
    if tokens <= ROWS_TOKENS:
        rows = 8 if numbers >= MANY_ROWS else 2
        warps = max(1, min(16, rows * row_bytes // (32 * THREAD_BYTES)))
        rows_kernel[(-(-numbers // rows),)](
            *(*given, rows, gpu.next_power_of_2(tokens), *kinds),
            num_warps=warps,
            **early_option(early),
        )
        return out
    rows = _tile_rows(numbers, gated)
    warps = min(16, max(4, padded // 256))
    tile_kernel[(-(-numbers // rows),)](
        *(*given, min(warps, padded // 16), rows, _tile_tokens(tokens), *kinds),
        num_warps=warps,
        **early_option(early),
    )
    return out


def accepts_block(input: Tensor, weight: Tensor) -> bool:
    """Some tokens [T, K] for the very many numbers of a head.

    Of float32 the library's product is the faster one on a device.
    """
    return (
        input.dim() == 2
        and TILE_TOKENS < input.shape[0] <= BLOCK_TOKENS
        and weight.shape[0] >= MANY_ROWS
        and input.dtype == weight.dtype
        and (input.dtype != torch.float32 or input.device.type != "cuda")
        and input.stride(1) == 1
        and weight.is_contiguous()
        and weight.shape[1] % PART == 0
        and _block_bytes(input) <= gpu.program_memory(input.device)
    )


def _block_bytes(input: Tensor) -> int:
    """Memory of a program's tiles that are on their way."""
    rows = BLOCK + _block_tokens(input.shape[0])
    return STAGES * rows * PART * input.element_size()


def _block_tokens(tokens: int) -> int:
    return 32 if tokens <= 32 else 64


def multiply_block(input: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    """Write out [T, N], see `block_kernel`; all that `accepts_block` asks for holds."""
    tokens, width = input.shape
    numbers = weight.shape[0]
    block_kernel[(-(-numbers // BLOCK),)](
        *(input, weight, weight if bias is None else bias, out, tokens, numbers, width),
        *(input.stride(0), out.stride(0), _block_tokens(tokens), BLOCK, PART, bias is not None),
        "ieee" if input.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=STAGES,
    )
    return out
