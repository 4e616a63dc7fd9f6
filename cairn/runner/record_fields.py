"""The fields of records beside the same fields in the pools."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.cache.host import STATE
from cairn.cache.pools import CachePools
from cairn.cache.record import ALIGNMENT, RecordLayout

WORD = torch.int64
"""Fields are copied as words of this type where their size allows it."""


class RecordFields:
    """The fields of one kind of records.

    Args:
        pools: the pools; their tensors stay where they are.
        kind, layout: of the records.
    """

    def __init__(self, pools: CachePools, kind: int, layout: RecordLayout) -> None:
        every = pools.rows if kind == STATE else pools.pages
        self._fields: list[tuple[Tensor, slice]] = []
        for part in layout.parts:
            field = every[part.layer][part.name]
            flat = field.view(len(field), -1).view(torch.uint8)
            end = part.begin + part.nbytes
            if part.nbytes % ALIGNMENT == 0:
                words = slice(part.begin // WORD.itemsize, end // WORD.itemsize)
                self._fields.append((flat.view(WORD), words))
            else:
                self._fields.append((flat, slice(part.begin, end)))

    def beside(self, records: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each field in records [n, bytes of a record] uint8, as [n, words], and in the pools, as
        [pages or states, words] of the same dtype."""
        in_words = records.view(WORD)
        for field, words in self._fields:
            yield (in_words if field.dtype == WORD else records)[:, words], field
