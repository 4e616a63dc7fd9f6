"""Blocks of a row that begin where memory is aligned, whatever the row's stride."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def aligned_block(base, block, width, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Of a row `base` numbers behind an aligned address: how far its block-th block begins from
    there, the place of its first number in the row, and whether all BLOCK lie inside.

    Loads of a whole block need no mask: they move ALIGN elements at once.
    """
    shift = base % ALIGN
    begin = block * BLOCK - shift
    whole = (begin >= 0) & (begin + BLOCK <= width)
    return tl.multiple_of(base - shift + block * BLOCK, ALIGN), begin, whole
