"""Single-layer steps of rows over small pools, without a runner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.attention.batch import Batch, PagePlace, StepRows
from cairn.attention.cuts import WHOLE, Cuts
from cairn.attention.inputs import GqaInputs, HilsInputs
from cairn.attention.registry import Backends, cache_schema
from cairn.attention.step import Step
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import PageFormat
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec

SIZE = 8
PLAIN = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, rotary=None)
WINDOW = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, rotary=None, window=9)
LANDMARK = HilsSpec(
    num_heads=4, num_kv_heads=2, head_dim=16, rotary=None, window=9, topk=2, softmax1=True,
    summary="mean", bias_by_entropy=False,
)  # fmt: skip


def backends_of(mixers: Sequence[GqaSpec], pages: int = 3, size: int = SIZE) -> Backends:
    """A step's pools, filled with random numbers."""
    schema = cache_schema(mixers, PageFormat(size, torch.float32))
    pools = CachePools(schema, PoolSizes((pages,) * len(schema.groups)), "cpu")
    for tensor in pools.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return Backends(mixers, pools)


def rows_of(chunks: Sequence[tuple[int, int]], decoding: int = 0) -> StepRows:
    """A step of rows 0, 1, ..., each given as (first slot, number of slots); the first ones
    decode."""
    first, count = (np.array(column, dtype=np.int64) for column in zip(*chunks, strict=True))
    slot = np.concatenate([np.arange(n, n + many) for n, many in chunks])
    return StepRows(np.arange(len(chunks)), first, count, slot, decoding)


def batch_of(counts: Sequence[int], watch: Tensor | None = None) -> Batch:
    """Rows that run the given numbers of slots from slot 0 on."""
    pages = [-(-count // SIZE) for count in counts]
    table = torch.zeros(len(counts), max(pages) + 1, dtype=torch.int32)
    for row, (end, count) in enumerate(zip(itertools.accumulate(pages), pages, strict=True)):
        table[row, :count] = torch.arange(end - count, end)
    slot = torch.cat([torch.arange(count) for count in counts])
    row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    page = table[row, slot // SIZE].long()
    done = (slot % SIZE == SIZE - 1).nonzero()[:, 0]
    return Batch(
        input_ids=slot,
        positions=slot,
        row=row,
        slot=slot,
        places=(PagePlace(table, page * SIZE + slot % SIZE),),
        completed=done,
        completed_pages=page[done],
        max_slot=max(counts) - 1,
        watch=watch,
    )


def step_of(
    mixer: GqaSpec,
    counts: Sequence[int],
    cuts: Cuts = WHOLE,
    told: bool = False,
    watch: Tensor | None = None,
) -> Step:
    """A step of one layer; `told`: the host knows the rows."""
    backends = backends_of([mixer], sum(-(-count // SIZE) for count in counts))
    rows = rows_of([(0, count) for count in counts]) if told else None
    return backends.step(batch_of(counts, watch), cuts, rows)


def attend(step: Step, q: Tensor, k: Tensor) -> Tensor:
    """Output of the layer for queries [T, h_q, d]; keys [T, h_kv, d] are also the values."""
    (layer,) = step.layers
    selects = layer.backend.name == "hsa"
    output: Tensor = layer.run(HilsInputs(q, k, k, q) if selects else GqaInputs(q, k, k))
    return output
