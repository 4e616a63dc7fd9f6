"""The kernel that finds the first token of each row of a step."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def ragged_rows_kernel(row, slot, starts, rows, first, tokens, most, BLOCK: tl.constexpr):
    """Write starts [most + 1], rows and first [most] of `ragged_rows`, by one program."""
    found, end = 0, 0
    for i in range(0, tokens, BLOCK):
        token = i + tl.arange(0, BLOCK)
        inside = token < tokens
        own = tl.load(row + token, mask=inside, other=-1)
        place = tl.load(slot + token, mask=inside, other=-1)
        before = tl.load(row + token - 1, mask=inside & (token > 0), other=-1)
        begins = ((place >= 0) & (own != before)).to(tl.int32)
        number = found + tl.cumsum(begins, 0) - 1
        chosen = (begins > 0) & (number < most)
        tl.store(starts + number, token, mask=chosen)
        tl.store(rows + number, own.to(tl.int32), mask=chosen)
        tl.store(first + number, place.to(tl.int32), mask=chosen)
        found += tl.sum(begins, 0)
        end += tl.sum((place >= 0).to(tl.int32), 0)
    for i in range(found, most + 1, BLOCK):
        number = i + tl.arange(0, BLOCK)
        tl.store(starts + number, end, mask=number <= most)
        tl.store(rows + number, -1, mask=number < most)
        tl.store(first + number, 0, mask=number < most)
