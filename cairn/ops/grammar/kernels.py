"""Kernel of the token bitmask."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def bitmask_kernel(
    logits, bitmask, indices, stride, mask_stride, width, WORDS: tl.constexpr, ALIGN: tl.constexpr
):
    """logits[row, token] = -inf where bit token of the mask's row is 0; indices may be None.

    The tokens of a word are written together: parts of a memory sector cost as much as reading it.
    Only words that forbid some are read. ALIGN divides stride.
    """
    row = tl.program_id(0).to(tl.int64)
    if indices is not None:
        row = tl.load(indices + row).to(tl.int64)
    number = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    word = tl.load(bitmask + row * mask_stride + number, mask=number * 32 < width, other=-1)
    bit = tl.arange(0, 32)[None, :]
    token = number[:, None] * 32 + bit
    allowed = ((word[:, None] >> bit) & 1) != 0
    at = logits + tl.multiple_of(row * stride, ALIGN) + token
    if (tl.program_id(1) + 1) * WORDS * 32 <= width:
        mixed = (word != 0) & (word != -1)
        value = tl.load(at, mask=mixed[:, None], other=float("-inf"))
        tl.store(at, tl.where(allowed, value, float("-inf")), mask=(word != -1)[:, None])
    else:
        tl.store(at, float("-inf"), mask=(token < width) & (allowed == 0))
