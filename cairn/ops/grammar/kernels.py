"""Kernel of the token bitmask."""

from __future__ import annotations

from cairn.ops.early import await_previous
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.blocks import aligned_block


@triton.jit
def mask_block(logits, words, token, width, WHOLE: tl.constexpr):
    """-inf to the forbidden ones of tokens [N] at addresses; WHOLE: all lie inside."""
    inside = None if WHOLE else (token >= 0) & (token < width)
    word = tl.load(words + (token >> 5), mask=inside)
    value = tl.load(logits, mask=inside)
    allowed = ((word >> (token & 31)) & 1) != 0
    tl.store(logits, tl.where(allowed, value, float("-inf")), mask=inside)


@triton.jit
def bitmask_kernel(
    logits, bitmask, indices, stride, mask_stride, width,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """logits[row, token] = -inf where bit token of the mask's row is 0; indices may be None. A row
    has BLOCKS programs.

    All of a block is written: parts of a memory sector cost more. EARLY: as in `await_previous`.
    """
    await_previous(EARLY)
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    if indices is not None:
        row = tl.load(indices + row).to(tl.int64)
    words = bitmask + row * mask_stride
    at, token, whole = aligned_block(row * stride, program % BLOCKS, width, BLOCK, ALIGN)
    logits += at + tl.arange(0, BLOCK)
    if whole:
        mask_block(logits, words, token, width, True)
    else:
        mask_block(logits, words, token, width, False)
