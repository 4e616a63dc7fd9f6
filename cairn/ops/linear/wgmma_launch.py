"""How products of some tokens with a large weight are launched in groups of warps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.linear.wgmma import linear_groups_kernel
from cairn.ops.norm.launch import LONGEST
from cairn.ops.pdl import pdl_option

FEWEST, MOST = 3, 64
"""Tokens of these products."""
ROWS, PART, STAGES = 64, 128, 6
"""Rows of a block of the weight, of which a program takes two; columns of a part of them; and how
many parts it has at once."""
SPARE = 1 << 10
"""Bytes of a program's memory beside those."""
REGISTERS = 128
"""Of a thread: programs of the small kernels around have place beside it."""
LEAST_BYTES = (1 << 24) + 1
"""Of a weight: smaller ones are held or asked for whole by other kernels."""
FILLED, WIDE_FILLED = 0.35, 0.9
"""Share of a device's processors that have a program at least, and where programs of more than 32
tokens are all there is to a product: with fewer, the library's reads less of the tokens."""
SPLIT_FILLED = {16: 0.7, 32: 0.7, 64: 0.45}
"""Sums are split until so many have one, by its tokens: every split is written and read again."""
WIDE_SPLIT_BYTES = 1 << 26
"""Of a weight for more than 32 tokens whose sums are split though no norm reads them."""
FEWEST_PARTS = 4
"""Of a split."""
_ALIGNED = 16
"""Bytes that a table's address and its lines' are multiples of."""


def accepts(input: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Some tokens [T, K] and a large weight [N, K] with enough rows for the device."""
    if not _fits(input, weight):
        return False
    filled = WIDE_FILLED if _tokens(input) > 32 and not gated else FILLED
    enough = _programs(weight) >= filled * gpu.processors(input.device)
    return enough and _aligned(input, weight)


def sums_split(input: Tensor, weight: Tensor) -> bool:
    """Whether `accepts_split` takes them wherever in memory they begin."""
    return _fits(input, weight) and weight.shape[0] <= LONGEST


def accepts_split(input: Tensor, weight: Tensor) -> bool:
    """Some tokens and a large weight, of any number of rows up to the longest norm, which adds up
    what the sums are split into."""
    return sums_split(input, weight) and _aligned(input, weight)


def accepts_added(input: Tensor, weight: Tensor) -> bool:
    """The same where nothing but the sum is wanted, and it is split."""
    return (
        accepts_split(input, weight)
        and (_tokens(input) <= 32 or _bytes(weight) >= WIDE_SPLIT_BYTES)
        and _splits(input, weight) > 1
    )


def _fits(input: Tensor, weight: Tensor) -> bool:
    size = weight.element_size()
    return (
        input.dim() == 2
        and FEWEST <= input.shape[0] <= MOST
        and input.dtype == weight.dtype
        and size == 2
        and gpu.supports_wgmma(input.device)
        and weight.is_contiguous()
        and _bytes(weight) >= LEAST_BYTES
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
    return -(-weight.shape[0] // (2 * ROWS))


def _tokens(input: Tensor) -> int:
    return max(16, gpu.next_power_of_2(input.shape[0]))


def _splits(input: Tensor, weight: Tensor) -> int:
    wanted = SPLIT_FILLED[_tokens(input)] * gpu.processors(input.device)
    most = -(-weight.shape[1] // PART) // FEWEST_PARTS
    return max(1, min(math.ceil(wanted / _programs(weight)), most))


def multiply(input: Tensor, weight: Tensor, out: Tensor, *, gated: bool = False) -> Tensor:
    """Write out [T, N], or of silu of the first half of the numbers, times the second, if `gated`;
    all that `accepts` asks for holds."""
    _launch(input, weight, out, 1, gated)
    return out


def multiply_parts(input: Tensor, weight: Tensor) -> Tensor:
    """Parts [splits, T, N] float32 whose sum is the product; all that `accepts_split` asks for
    holds."""
    splits = _splits(input, weight)
    parts = gpu.empty((splits, input.shape[0], weight.shape[0]), torch.float32, input.device)
    _launch(input, weight, parts, splits, False)
    return parts


def _launch(input: Tensor, weight: Tensor, out: Tensor, splits: int, gated: bool) -> None:
    """`linear_groups_kernel` with as many parts at once as a program has memory for."""
    tokens, pdl = _tokens(input), gpu.supports_pdl(input.device)
    held = (2 * ROWS + tokens) * PART * weight.element_size()
    stages = min(STAGES, (gpu.program_memory(input.device) - SPARE) // held)
    linear_groups_kernel[(_programs(weight), splits)](
        *(_table(input, tokens), _table(weight, ROWS), out),
        *(input.shape[0], out.shape[-1], out.stride(-2), -(-weight.shape[1] // PART)),
        *(ROWS, tokens, PART, stages, gated, out.dim() == 3, pdl),
        num_warps=4,
        maxnreg=REGISTERS,
        **pdl_option(pdl),
    )


def _table(lines: Tensor, rows: int) -> object:
    block = (rows, PART)
    return gpu.tiles(gpu.blocks(lines, lines.shape, lines.stride(), block), block)
