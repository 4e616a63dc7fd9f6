"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.gguf.blocks import KINDS
from cairn.ops.gguf.ggml import (
    ggml_dequantize,
    ggml_moe_a8,
    ggml_moe_a8_vec,
    ggml_mul_mat_a8,
    ggml_mul_mat_vec_a8,
)
from cairn.ops.testing import Cases, Make

PLAIN = (2, 8, 12, 14)
"""Type ids of formats without a grid."""
SCALES = {2: (0,), 8: (0,), 12: (0, 2), 14: (208,)}
"""Byte offsets of the float16 scales in their blocks."""


def _weight(make: Make, kind: int, *shape: int) -> Tensor:
    """Random blocks [.., bytes of a row] whose scales are small and finite."""
    *rows, width = shape
    numbers, size = KINDS[kind].elements, KINDS[kind].bytes
    blocks = make.randint(0, 256, *rows, width // numbers, size, dtype=torch.uint8)
    for at in SCALES[kind]:
        blocks[..., at + 1] = blocks[..., at + 1] & 0x83 | 0x14
    return blocks.flatten(-2)


@ggml_dequantize.cases
def _(make: Make) -> Cases:
    for kind in PLAIN:
        weight = _weight(make, kind, 3, 512)
        yield make.args(weight, kind, 3, 512, torch.float32)
        yield make.args(weight, kind, 3, 512, torch.bfloat16)
    yield make.args(weight[:0], kind, 0, 512)


@ggml_mul_mat_vec_a8.cases
@ggml_mul_mat_a8.cases
def _(make: Make) -> Cases:
    for kind in PLAIN:
        for dtype in (torch.float32, torch.bfloat16):
            yield make.args(_weight(make, kind, 6, 256), make.randn(3, 256, dtype=dtype), kind, 6)


@ggml_moe_a8.cases
def _(make: Make) -> Cases:
    order = make.tensor([4, 1, *[6] * 6, 0, 2, 5, *[6] * 5], torch.int32)
    experts, used = make.tensor([1, 0], torch.int32), make.tensor([16], torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        weight, x = _weight(make, 12, 2, 6, 256), make.randn(3, 256, dtype=dtype)
        yield make.args(x, weight, order, experts, used, 12, 6, 2, 3)


@ggml_moe_a8_vec.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        weight, x = _weight(make, 8, 2, 6, 256), make.randn(3, 256, dtype=dtype)
        yield make.args(x, weight, make.randint(-1, 2, 3, 2), 2, 8, 6, 3)
