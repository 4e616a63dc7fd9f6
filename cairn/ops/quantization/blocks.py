"""Matrices in e4m3 with a scale for each block, and rows with one for each group of elements,
dequantized to float32; used by the reference implementations of block-scaled GEMMs (DeepSeek-V3
report, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.quantization.codes import E4M3_MAX, e4m3, inverse, scale_for

SIZE = 128
"""Elements of a group, and rows and columns of a block."""
EPS = 1e-10
"""Lower bound of a group's largest magnitude."""


def count(elements: int) -> int:
    """Number of groups of this many elements; the last group may be shorter."""
    return -(-elements // SIZE)


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """[N, K] float32 of codes [N, K] and scales [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = codes.shape
    return codes.float() * spread(spread(scale, 0, rows), 1, columns)


def spread(scale: Tensor, axis: int, elements: int) -> Tensor:
    """Scales of groups along an axis, repeated for each of its elements."""
    return scale.repeat_interleave(SIZE, dim=axis).narrow(axis, 0, elements)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, K] e4m3 of rows [R, K], and scales [R, ceil(K / 128)] float32."""
    rows, width = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -width % SIZE)).view(rows, count(width), SIZE)
    scale = scale_for(groups.abs().amax(dim=-1).clamp(min=EPS), E4M3_MAX)
    codes = e4m3(groups * inverse(scale).unsqueeze(-1))
    return codes.flatten(1)[:, :width], scale


def rounded(x: Tensor) -> Tensor:
    """Rows [R, K] quantized and dequantized: float32."""
    codes, scale = quantized(x)
    return codes.float() * spread(scale, 1, x.shape[1])
