"""Kernel of the token bitmask."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid import row_and_part
from cairn.ops.pdl import await_previous
from cairn.ops.sampling.kernels.blocks import aligned_block


@triton.jit
def mask_inside(logits, words, begin, width, BLOCK: tl.constexpr):
    """-inf to the forbidden ones of tokens begin .. begin + BLOCK - 1, as far as they lie inside
    the row; the first one's logit lies at `logits`."""
    i = tl.arange(0, BLOCK)
    token = begin + i
    inside = (token >= 0) & (token < width)
    word = tl.load(words + (token >> 5), mask=inside)
    value = tl.load(logits + i, mask=inside)
    allowed = ((word >> (token & 31)) & 1) != 0
    tl.store(logits + i, tl.where(allowed, value, float("-inf")), mask=inside)


@triton.jit
def mask_whole(logits, words, begin, BLOCK: tl.constexpr):
    """The same of tokens that all lie inside: a thread has four in a row, whose bits may lie in two
    words."""
    i = tl.arange(0, 4)[None, :]
    first = tl.arange(0, BLOCK // 4) * 4
    token = begin + first
    low = tl.load(words + (token >> 5)).to(tl.uint32, bitcast=True)
    high = tl.load(words + ((token + 3) >> 5)).to(tl.uint32, bitcast=True)
    both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    bits = (both >> (token & 31).to(tl.uint64)).to(tl.uint32)[:, None]
    at = logits + first[:, None] + i
    value = tl.load(at, eviction_policy="evict_first")
    value = tl.where((bits & (1 << i)) != 0, value, float("-inf"))
    tl.store(at, value, eviction_policy="evict_first")


@triton.jit(early=())
def bitmask_kernel(
    logits, bitmask, indices, stride, mask_stride, width,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits[row, token] = -inf where bit token of the mask's row is 0; indices may be None. A row
    has BLOCKS programs.

    All of a block is written: parts of a memory sector cost more. PDL: as in `await_previous`.
    """
    await_previous(PDL)
    row, block = row_and_part(BLOCKS)
    if indices is not None:
        row = tl.load(indices + row).to(tl.int64)
    words = bitmask + row * mask_stride
    at, begin, whole = aligned_block(row * stride, block, width, BLOCK, ALIGN)
    logits += at
    if whole:
        mask_whole(logits, words, begin.to(tl.int32), BLOCK)
    else:
        mask_inside(logits, words, begin, width, BLOCK)
