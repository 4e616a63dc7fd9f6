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


def fields_of(
    records: Tensor, pools: CachePools, kind: int, layout: RecordLayout
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each field in records and in the pools.

    Args:
        records: [n, bytes of a record] uint8.
        pools: the pools.
        kind, layout: of the records.

    Yields:
        [n, words of the field] in the records, [pages or states, words] in the pools, in one dtype.
    """
    every = pools.rows if kind == STATE else pools.pages
    for part in layout.parts:
        field = every[part.layer][part.name]
        flat = field.view(len(field), -1).view(torch.uint8)
        record = records[:, part.begin : part.begin + part.nbytes]
        if part.nbytes % ALIGNMENT == 0:
            yield record.view(WORD), flat.view(WORD)
        else:
            yield record, flat
