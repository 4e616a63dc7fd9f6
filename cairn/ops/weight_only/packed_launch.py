"""How products with weights of 4 and 8 bits are launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.weight_only import layout
from cairn.ops.weight_only.packed_kernels import (
    dequantize_packed_kernel,
    linear_packed_kernel,
    sum_parts_kernel,
)

MOST_TOKENS = 64
"""More are multiplied with the weight in their own dtype."""
NUMBERS = 64
"""Columns of words of a program."""
PROGRAMS_A_PROCESSOR = 4
"""That a product of few tokens is split into."""
FEWEST_BLOCKS = 4
"""Of a part of the sums."""
SUMMED = 1024
OFFSETS = {(torch.float16, 4): 1024.0, (torch.float16, 8): 1024.0, (torch.bfloat16, 4): 128.0}
"""Dtype of the tokens, bits -> what is added to codes in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight.

    Attributes:
        words: [.., W, N] int32.
        scale: [.., G, N] float32.
        zero: [.., G, N] int16, or None.
        bits, width: of a code, and K.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    width: int

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return self.width // self.scale.shape[-2]


def accepts(weight: Packed) -> bool:
    """Words, scales and zero points side by side."""
    tensors = (weight.words, weight.scale, weight.zero)
    return all(x is None or x.is_contiguous() for x in tensors) and weight.words.numel() > 0


def multiplies(x: Tensor, weight: Packed) -> bool:
    """Few rows [T, K] with their numbers side by side, and groups of whole runs of 16 numbers."""
    return (
        accepts(weight)
        and x.stride(1) == 1
        and x.shape[0] <= MOST_TOKENS
        and (weight.scale.shape[-2] == 1 or weight.group % layout.ROWS == 0)
    )


def multiply(x: Tensor, weight: Packed, out: Tensor) -> Tensor:
    """`linear_packed_kernel`: x [T, K] into out [T, N]; all that `multiplies` asks for holds."""
    tokens, numbers = out.shape
    if not tokens:
        return out
    blocks = weight.words.shape[0] // layout.ROWS
    tall = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    columns = -(-numbers // NUMBERS)
    wanted = -(-PROGRAMS_A_PROCESSOR * gpu.processors(x.device) // columns)
    parts = max(1, min(wanted, blocks // FEWEST_BLOCKS))
    split = -(-blocks // parts)
    parts = -(-blocks // split)
    pdl = gpu.supports_pdl(x.device)
    into = out
    if parts > 1:
        into = gpu.empty((parts, tokens, numbers), torch.float32, x.device)
    linear_packed_kernel[(columns, parts)](
        x=x,
        words=weight.words,
        scale=weight.scale,
        zero=weight.zero,
        out=into,
        tokens=tokens,
        width=weight.width,
        numbers=numbers,
        groups=weight.scale.shape[0],
        x_stride=x.stride(0),
        out_stride=numbers,
        split=split,
        BITS=weight.bits,
        GROUP=0 if weight.scale.shape[0] == 1 else weight.group,
        OFFSET=OFFSETS.get((x.dtype, weight.bits), 0.0),
        BM=tall,
        BN=NUMBERS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=4,
        num_stages=4,
    )
    if parts > 1:
        count = tokens * numbers
        sum_parts_kernel[(-(-count // SUMMED),)](
            parts=into, out=out, count=count, PARTS=parts, BLOCK=SUMMED, PDL=pdl, num_warps=4
        )
    return out


def dequantize(weight: Packed, out: Tensor) -> Tensor:
    """`dequantize_packed_kernel`: into out [.., N, K]."""
    rows, numbers = weight.words.shape[-2:]
    experts = weight.words[..., 0, 0].numel()
    grid = (-(-numbers // NUMBERS), rows // layout.ROWS, experts)
    dequantize_packed_kernel[grid](
        words=weight.words,
        scale=weight.scale,
        zero=weight.zero,
        out=out,
        rows=rows,
        numbers=numbers,
        width=weight.width,
        groups=weight.scale.shape[-2],
        group=weight.group,
        BITS=weight.bits,
        BN=NUMBERS,
        num_warps=4,
    )
    return out
