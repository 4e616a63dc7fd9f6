"""Kernel of the token bitmask."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def bitmask_kernel(logits, bitmask, indices, stride, mask_stride, width, BLOCK: tl.constexpr):
    """logits[row, token] = -inf where bit token of the mask's row is 0; indices may be None."""
    row = tl.program_id(0).to(tl.int64)
    if indices is not None:
        row = tl.load(indices + row).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    word = tl.load(bitmask + row * mask_stride + token // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + row * stride + token, float("-inf"), mask=forbidden)
