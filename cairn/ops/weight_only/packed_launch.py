"""How products with weights of 4 and 8 bits are launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.moe.experts_launch import grouped
from cairn.ops.moe.tuning import Tile
from cairn.ops.weight_only import layout
from cairn.ops.weight_only.packed_kernels import (
    dequantize_packed_kernel,
    experts_packed_kernel,
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
        e4m3: codes are numbers, and not integers.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    width: int
    e4m3: bool = False

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return self.width // self.scale.shape[-2]


def accepts(weight: Packed) -> bool:
    """Words, scales and zero points side by side."""
    tensors = (weight.words, weight.scale, weight.zero)
    return all(x is None or x.is_contiguous() for x in tensors) and weight.words.numel() > 0


def multiplies(x: Tensor, weight: Packed, few: bool = True) -> bool:
    """Rows [T, K] with their numbers side by side, few of them, and groups of whole runs of 16
    numbers."""
    return (
        accepts(weight)
        and x.stride(1) == 1
        and (not few or x.shape[0] <= MOST_TOKENS)
        and (weight.scale.shape[-2] == 1 or weight.group % layout.ROWS == 0)
    )


def _weight(x: Tensor, weight: Packed) -> dict[str, Any]:
    """Arguments of a product's kernel that tell the weight and the dtype of x."""
    plain = not weight.e4m3
    return {
        "words": weight.words,
        "scale": weight.scale,
        "zero": weight.zero,
        "width": weight.width,
        "numbers": weight.words.shape[-1],
        "groups": weight.scale.shape[-2],
        "blocks": weight.words.shape[-2] // layout.ROWS,
        "BITS": weight.bits,
        "E4M3": weight.e4m3,
        "GROUP": 0 if weight.scale.shape[-2] == 1 else weight.group,
        "BN": NUMBERS,
        "MIDDLE": float(1 << weight.bits - 1) if plain else 0.0,
        "OFFSET": OFFSETS.get((x.dtype, weight.bits), 0.0) if plain else 0.0,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }


def multiply(x: Tensor, weight: Packed, out: Tensor) -> Tensor:
    """`linear_packed_kernel`: x [T, K] into out [T, N]; all that `multiplies` asks for holds."""
    tokens, numbers = out.shape
    if not tokens:
        return out
    blocks = weight.words.shape[0] // layout.ROWS
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
        out=into,
        tokens=tokens,
        x_stride=x.stride(0),
        out_stride=numbers,
        split=split,
        BM=16 if tokens <= 16 else 32 if tokens <= 32 else 64,
        PDL=pdl,
        num_warps=4,
        num_stages=4,
        **_weight(x, weight),
    )
    if parts > 1:
        count = tokens * numbers
        sum_parts_kernel[(-(-count // SUMMED),)](
            parts=into, out=out, count=count, PARTS=parts, BLOCK=SUMMED, PDL=pdl, num_warps=4
        )
    return out


def multiply_experts(x: Tensor, weight: Packed, ids: Tensor, share: int, out: Tensor) -> Tensor:
    """`experts_packed_kernel`: into out [places, N]; places of no expert are 0."""
    places, numbers = out.shape
    if not places:
        return out
    experts = weight.words.shape[0]
    tall = 16 if places <= 16 * experts else 32 if places <= 48 * experts else 64
    tile = Tile(tall, NUMBERS, layout.block(weight.bits), 4, 3)
    rows = grouped(ids, experts, tile)
    assert rows.owners is not None
    out.zero_()
    experts_packed_kernel[(-(-numbers // NUMBERS), rows.tiles)](
        x=x,
        out=out,
        order=rows.order,
        owners=rows.owners,
        used=rows.used,
        places=places,
        share=share,
        count=rows.count,
        x_stride=x.stride(0),
        BM=tall,
        SINGLE=rows.single,
        PDL=gpu.supports_pdl(x.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_weight(x, weight),
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
        E4M3=weight.e4m3,
        BN=NUMBERS,
        MIDDLE=0.0 if weight.e4m3 else float(1 << weight.bits - 1),
        num_warps=4,
    )
    return out
