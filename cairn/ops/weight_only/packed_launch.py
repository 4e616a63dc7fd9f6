"""Launches of the matrix products with packed weights of 4 and 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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

MAX_TOKENS = 64
"""Most tokens for the packed kernel; with more, `linear_packed` dequantises the weight and
multiplies in the tokens' dtype."""
COLUMNS = 64
"""Output columns per program of the experts' products and of dequantisation."""
MIN_BLOCKS = 4
"""Fewest blocks of K per split of split-K."""


class Shape(NamedTuple):
    """Tile sizes of a program of the product.

    Attributes:
        columns: output columns per program.
        warps, stages: num_warps and num_stages of the launch.
        programs: programs per multiprocessor that split-K aims at if the columns alone give fewer.
    """

    columns: int
    warps: int
    stages: int
    programs: int


SHAPE = Shape(128, 4, 4, 2)
SUMMED = 1024
"""Outputs per program of `sum_parts_kernel`."""
OFFSETS = {(torch.float16, 4): 1024.0, (torch.float16, 8): 1024.0, (torch.bfloat16, 4): 128.0}
"""(dtype of the tokens, bits) -> float into whose mantissa codes are or'ed: the resulting float is
the sum of this float and the code."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [N, K] in the layout of `cairn.ops.weight_only.layout`.

    Attributes:
        words: [.., W, N] int32.
        scale: [.., G, N] float32.
        zero: [.., G, N] int16, or None.
        bits: bits per code.
        width: K.
        e4m3: codes are float8 e4m3 values, not integers.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    width: int
    e4m3: bool = False

    @property
    def group(self) -> int:
        """Elements of a row per scale."""
        return self.width // self.scale.shape[-2]


def accepts(weight: Packed) -> bool:
    """Whether kernels can read the weight: it is contiguous and not empty."""
    tensors = (weight.words, weight.scale, weight.zero)
    return all(x is None or x.is_contiguous() for x in tensors) and weight.words.numel() > 0


def multiplies(x: Tensor, weight: Packed, few: bool = True) -> bool:
    """Whether kernels multiply x [T, K], whose rows are contiguous, with the weight, whose groups
    are multiples of 16. few: also at most MAX_TOKENS tokens."""
    return (
        accepts(weight)
        and x.stride(1) == 1
        and (not few or x.shape[0] <= MAX_TOKENS)
        and (weight.scale.shape[-2] == 1 or weight.group % layout.ROWS == 0)
    )


def _weight(x: Tensor, weight: Packed) -> dict[str, Any]:
    """Arguments of the product kernels that describe the weight and depend on x's dtype."""
    plain = not weight.e4m3
    return {
        "words": weight.words,
        "scale": weight.scale,
        "zero": weight.zero,
        "width": weight.width,
        "outputs": weight.words.shape[-1],
        "groups": weight.scale.shape[-2],
        "blocks": weight.words.shape[-2] // layout.ROWS,
        "BITS": weight.bits,
        "E4M3": weight.e4m3,
        "GROUP": 0 if weight.scale.shape[-2] == 1 else weight.group,
        "MIDDLE": float(1 << weight.bits - 1) if plain else 0.0,
        "OFFSET": OFFSETS.get((x.dtype, weight.bits), 0.0) if plain else 0.0,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "EVEN": weight.width % layout.block(weight.bits) == 0,
    }


def multiply(x: Tensor, weight: Packed, out: Tensor, shape: Shape = SHAPE) -> Tensor:
    """`linear_packed_kernel`: x [T, K] times the weight into out [T, N]; requires `multiplies`."""
    tokens, outputs = out.shape
    if not tokens:
        return out
    blocks = weight.words.shape[0] // layout.ROWS
    columns = -(-outputs // shape.columns)
    wanted = -(-shape.programs * gpu.sm_count(x.device) // columns)
    parts = max(1, min(wanted, blocks // MIN_BLOCKS))
    split = -(-blocks // parts)
    parts = -(-blocks // split)
    pdl = gpu.supports_pdl(x.device)
    into = out
    if parts > 1:
        into = gpu.empty((parts, tokens, outputs), torch.float32, x.device)
    linear_packed_kernel[(columns, parts)](
        x=x,
        out=into,
        tokens=tokens,
        x_stride=x.stride(0),
        out_stride=outputs,
        split=split,
        BM=16 if tokens <= 16 else 32 if tokens <= 32 else 64,
        BN=shape.columns,
        STAGES=shape.stages,
        PDL=pdl,
        num_warps=shape.warps,
        **_weight(x, weight),
    )
    if parts > 1:
        count = tokens * outputs
        sum_parts_kernel[(-(-count // SUMMED),)](
            parts=into, out=out, count=count, PARTS=parts, BLOCK=SUMMED, PDL=pdl, num_warps=4
        )
    return out


def multiply_experts(x: Tensor, weight: Packed, ids: Tensor, share: int, out: Tensor) -> Tensor:
    """`experts_packed_kernel`: into out [pairs, N]; 0 for pairs without an expert."""
    pairs, outputs = out.shape
    if not pairs:
        return out
    experts = weight.words.shape[0]
    block_m = 16 if pairs <= 16 * experts else 32 if pairs <= 48 * experts else 64
    tile = Tile(block_m, COLUMNS, layout.block(weight.bits), 4, 3)
    rows = grouped(ids, experts, tile)
    if block_m == 16 and not rows.single:
        # Sorted pairs whose rows are read again for every tile of columns: 15 to 21% faster on an
        # H200.
        tile = tile._replace(columns=2 * COLUMNS)
    assert rows.owners is not None
    if not rows.single:
        out.zero_()
    experts_packed_kernel[(-(-outputs // tile.columns), rows.tiles)](
        x=x,
        out=out,
        order=rows.order,
        owners=rows.owners,
        used=rows.used,
        pairs=pairs,
        share=share,
        count=rows.count,
        x_stride=x.stride(0),
        BM=block_m,
        BN=tile.columns,
        STAGES=tile.stages,
        SINGLE=rows.single,
        PDL=gpu.supports_pdl(x.device),
        num_warps=tile.warps,
        **_weight(x, weight),
    )
    return out


def dequantize(weight: Packed, out: Tensor) -> Tensor:
    """`dequantize_packed_kernel`: into out [.., N, K]."""
    rows, outputs = weight.words.shape[-2:]
    experts = weight.words[..., 0, 0].numel()
    grid = (-(-outputs // COLUMNS), rows // layout.ROWS, experts)
    dequantize_packed_kernel[grid](
        words=weight.words,
        scale=weight.scale,
        zero=weight.zero,
        out=out,
        rows=rows,
        outputs=outputs,
        width=weight.width,
        groups=weight.scale.shape[-2],
        group=weight.group,
        BITS=weight.bits,
        E4M3=weight.e4m3,
        BN=COLUMNS,
        MIDDLE=0.0 if weight.e4m3 else float(1 << weight.bits - 1),
        WHOLE=weight.group % layout.block(weight.bits) == 0,
        num_warps=4,
    )
    return out
