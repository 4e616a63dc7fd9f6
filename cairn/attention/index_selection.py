"""Selection by an indexer: the cells of the keys with the best scores. In latent attention there is
a key per token, in compressed attention a key per entry."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.inputs import IndexInputs
from cairn.attention.mla_format import IndexFormat

BLOCK_BYTES = 64 << 20
"""Bytes of scores computed at once: scores grow with the context."""
DIVIDED = 16
"""Queries that ranks divide; of fewer each rank selects for all, which takes no longer."""


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """The keys of an indexer, and the number that each query sees.

    Attributes:
        cache: the keys in pages.
        form: their format in pages.
        page_table: [rows, pages] int32.
        size: keys per page.
        row: [T] int64, of each query in the page table.
        seen: [T] int32, the number of keys from the first on that each query sees.
        width: the largest of these.
    """

    cache: Tensor
    form: IndexFormat
    page_table: Tensor
    size: int
    row: Tensor
    seen: Tensor
    width: int


def select_cells(index: IndexInputs, keys: IndexKeys, topk: int, chunked: bool) -> Tensor:
    """Cells [T, topk] int32, page * size + place in the page, of the keys with the best scores;
    then -1. Each rank selects for a part of the queries and gets the cells of the others.

    Args:
        index: queries and weights.
        keys: the keys to score.
        topk: keys that each query selects, at most.
        chunked: see `cairn.ops.paged_mqa_logits`.
    """
    group, count = index.group, len(keys.row)
    if not group.alone and count >= DIVIDED and count % group.size == 0:
        each = count // group.size
        own = slice(group.rank * each, (group.rank + 1) * each)
        mine = IndexInputs(index.q[own], None, index.weights[own])
        its = replace(keys, row=keys.row[own], seen=keys.seen[own])
        return group.gathered(select_cells(mine, its, topk, chunked)).flatten(0, 1)
    q, weights, form = index.q, index.weights, keys.form
    if form.quantized:
        q, weights = ops.index_q_quantize(q, weights, form.rotated)
    found = []
    for part in _blocks(len(keys.row), keys.width):
        row, seen = keys.row[part], keys.seen[part]
        logits = ops.paged_mqa_logits(
            q[part],
            weights[part],
            keys.cache,
            keys.page_table,
            row,
            seen,
            keys.width,
            form.preshuffled,
            least=topk,
            chunked=chunked,
        )
        found.append(ops.select_topk(logits, seen, topk, None, keys.page_table, row, keys.size))
    return found[0] if len(found) == 1 else torch.cat(found)


def _blocks(queries: int, width: int) -> list[slice]:
    """Parts of this many queries whose float32 scores of `width` keys fit in BLOCK_BYTES."""
    most = max(1, BLOCK_BYTES // (4 * max(1, width)))
    return [slice(first, first + most) for first in range(0, max(1, queries), most)]
