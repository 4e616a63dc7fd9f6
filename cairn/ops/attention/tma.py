"""Keys and values as a device's copy engine takes them: blocks of lines of one table in memory.

Hopper's engine (TMA) moves a block of a table by the numbers of its first line and column: threads
compute no addresses, and what they wait for is in shared memory as products need it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.tuning import TUNING

_ALIGNED = 16
"""Bytes that a table's address and its lines' are multiples of."""
_MOST_LINES = 1 << 31
_Table = tuple[tuple[int, int], int, int, int, int]


class Lines(NamedTuple):
    """Tokens [pages, slots, heads, d] of any strides as the lines of a table.

    Slot s of page p and head h is line p * page + h * head + s, from column h * column on.
    """

    blocks: Any
    """Triton's description of the table and of its blocks [keys, d]; None: it is no table."""
    page: int
    head: int
    column: int


NO_LINES = Lines(None, 0, 0, 0)


def lines_of(k: Tensor, v: Tensor, keys: int, flops: float) -> tuple[Lines, Lines]:
    """k and v [pages, slots, heads, d] in blocks of `keys` slots, for a launch of so many
    operations; NO_LINES twice where one of them is no table, pages are no whole blocks, it does not
    pay, or the device has no such engine."""
    if flops < TUNING.tma_least_flops or not gpu.supports_tma(k.device):
        return NO_LINES, NO_LINES
    tables = []
    for tokens in (k, v):
        table = _table_of(tokens, keys)
        if table is None:
            return NO_LINES, NO_LINES
        shape, line, *where = table
        blocks = gpu.blocks(tokens, shape, (line, 1), (keys, tokens.shape[3]))
        tables.append(Lines(blocks, *where))
    return tables[0], tables[1]


def are_lines(tokens: Tensor, keys: int) -> bool:
    """Whether `lines_of` takes tokens."""
    return _table_of(tokens, keys) is not None


def _table_of(tokens: Tensor, keys: int) -> _Table | None:
    if tokens.data_ptr() % _ALIGNED:
        return None
    return _table(tokens.shape, tokens.stride(), tokens.element_size(), keys)


@functools.lru_cache(256)
def _table(shape: tuple[int, ...], strides: tuple[int, ...], size: int, keys: int) -> _Table | None:
    """(lines and columns, a line's stride, the three numbers of `Lines`) of the table that a view
    [pages, slots, heads, d] is, of numbers of `size` bytes; None: of none."""
    pages, slots, heads, width = shape
    # The stride of a dimension of size 1 is arbitrary.
    page, slot, head, one = (0 if n == 1 else s for n, s in zip(shape, strides, strict=True))
    slot = slot or width
    aside = head < slot
    if (
        not all(shape)
        or slots < keys
        or one != 1
        # Products pad heads narrower than 16, which a TMA block cannot be.
        or width < 16
        or width != gpu.next_power_of_2(width)
        or page % slot
        or (head % slot and not aside)
        or any(size * n % _ALIGNED for n in (width, slot, head))
    ):
        return None
    lines = (pages - 1) * (page // slot) + slots
    columns = width
    if aside:
        columns += (heads - 1) * head
    else:
        lines += (heads - 1) * (head // slot)
    if lines >= _MOST_LINES:
        return None
    step = (page // slot, 0 if aside else head // slot, head if aside else 0)
    return (lines, columns), slot, *step
