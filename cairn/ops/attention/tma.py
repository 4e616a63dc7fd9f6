"""TMA tables of keys and values: a tensor as one 2D table, which is loaded in blocks of lines.

TMA (Hopper) copies a block given the indices of its first line and column: threads compute no
addresses, and blocks arrive in shared memory in the layout that wgmma needs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention.tuning import TUNING

_ALIGNED = 16
"""Alignment in bytes of a table's address and of its line stride."""
_MAX_LINES = 1 << 31
_Table = tuple[tuple[int, int], int, int, int, int]


class Lines(NamedTuple):
    """A tensor [pages, slots, heads, d] with any strides as a TMA table.

    Slot s of page p and head h is line p * page + h * head + s, from column h * column on.
    """

    blocks: Any
    """Triton's tensor descriptor with blocks [keys, d]; None: not representable."""
    page: int
    head: int
    column: int


NO_LINES = Lines(None, 0, 0, 0)


def lines_of(k: Tensor, v: Tensor, keys: int, flops: float) -> tuple[Lines, Lines]:
    """TMA tables of k and v [pages, slots, heads, d] in blocks of `keys` slots, for a launch of
    `flops` operations; NO_LINES twice if one of them is not representable, pages are not whole
    blocks, it does not pay, or the device has no TMA."""
    if flops < TUNING.tma_min_flops or not gpu.supports_tma(k.device):
        return NO_LINES, NO_LINES
    tables = []
    for tokens in (k, v):
        table = _table_of(tokens, keys)
        if table is None:
            return NO_LINES, NO_LINES
        shape, line, *where = table
        blocks = gpu.tensor_descriptor(tokens, shape, (line, 1), (keys, tokens.shape[3]))
        tables.append(Lines(blocks, *where))
    return tables[0], tables[1]


def are_lines(tokens: Tensor, keys: int) -> bool:
    """Whether `lines_of` supports a tensor."""
    return _table_of(tokens, keys) is not None


def _table_of(tokens: Tensor, keys: int) -> _Table | None:
    if tokens.data_ptr() % _ALIGNED:
        return None
    return _table(tokens.shape, tokens.stride(), tokens.element_size(), keys)


@functools.lru_cache(256)
def _table(shape: tuple[int, ...], strides: tuple[int, ...], size: int, keys: int) -> _Table | None:
    """(lines and columns, a line's stride, the three numbers of `Lines`) of the table that
    represents a view [pages, slots, heads, d] with elements of `size` bytes; None: not
    representable."""
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
    if lines >= _MAX_LINES:
        return None
    step = (page // slot, 0 if aside else head // slot, head if aside else 0)
    return (lines, columns), slot, *step
