"""Latent attention over the paged cache, of all tokens or of those that an indexer selects.

A layer's pages have a record [latent | rotary key] of each token and, in a layer with an indexer,
an index key. A *cell*, page * S + slot % S, is a token's location.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, StepPlan
from cairn.attention.batch import Batch, PagePlace, StepRows
from cairn.attention.cuts import Cuts
from cairn.attention.first_slot import cleared, draft_fields, without_first
from cairn.attention.index_selection import IndexKeys, select_cells
from cairn.attention.inputs import IndexInputs, MlaInputs
from cairn.attention.mla_format import (
    INDEX_KEY,
    RECORD,
    IndexFormat,
    index_field,
    record_field,
)
from cairn.attention.side_stream import side_by_side
from cairn.cache.pools import CachePools
from cairn.cache.schema import LayerSchema, PageFormat
from cairn.specs.backends import MLA
from cairn.specs.mla import MlaSpec

MAX_BESIDE = 1024
"""Tokens of a step whose indexer may run on a second stream: with more, the indexer fills the
device by itself."""


@dataclass(slots=True, kw_only=True)
class MlaPlan(StepPlan):
    """Metadata of latent attention for a step.

    Attributes:
        place: page table and locations, the same for all layers.
        context: [T] int32, tokens that a query sees: its own and all before; 0: padding.
        width: the most that any of them sees.
        cells: [T, topk] int32, of the tokens that queries selected in the last layer with an
            indexer, then -1; None: no selection yet.
    """

    place: PagePlace
    context: Tensor
    width: int
    cells: Tensor | None = None


class MlaBackend(AttentionBackend):
    """Softmax attention of all heads over the same records: all tokens', or the topk that the
    scores of an indexer choose for each query.

    A query that sees no more than topk tokens reads all of them; no scores are computed if that is
    true of a whole step.
    """

    name: ClassVar[str] = MLA

    def __init__(self, pools: CachePools, layers: Mapping[int, MlaSpec]) -> None:
        super().__init__(pools, layers)
        (self._group,) = {pools.schema.group_of[layer][RECORD] for layer in layers}
        self._index = {
            layer: IndexFormat.of(found, spec.indexer.head_dim)
            for layer, spec in self.layers.items()
            for found in pools.schema.layers[layer].pages
            if found.name == INDEX_KEY and spec.indexer is not None
        }

    @classmethod
    def needs(cls, spec: MlaSpec, form: PageFormat) -> LayerSchema:
        """A record of every token, and the indexer's key.

        Raises:
            BadConfig: for pages whose format does not hold them.
        """
        fields = [record_field(spec, form), *draft_fields(spec.draft_width, form)]
        if spec.indexer is not None:
            fields.append(index_field(spec.indexer.head_dim, form))
        return LayerSchema(tuple(fields))

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> MlaPlan:
        """Compute the number of tokens that each query sees."""
        return MlaPlan(
            batch,
            cuts,
            rows,
            place=batch.places[self._group],
            context=(batch.slot + 1).to(torch.int32),
            width=batch.max_slot + 1,
        )

    def run(self, layer: int, inputs: MlaInputs, plan: MlaPlan) -> Tensor:
        """Attend in latents: -> [T, H, r] in q's dtype."""
        spec, records, q = self.layers[layer], self.pools.pages[layer][RECORD], inputs.q
        place, context, rank = plan.place, plan.context, spec.kv_lora_rank
        if spec.draft_width:
            inputs = _without_first(inputs, plan.batch.slot)
        narrow = spec.topk is None or plan.width <= spec.topk

        def index() -> None:
            """Store the step's keys, and select."""
            if inputs.index is not None:
                assert inputs.index.k is not None
                self._store(layer, inputs.index.k, place.location)
                if not narrow:
                    assert spec.topk is not None
                    plan.cells = self._selected(layer, inputs.index, spec.topk, plan)

        def absorb() -> None:
            """Store the step's records, and write the latent part of q if it is missing."""
            ops.mla_kv_store(inputs.latent, inputs.k_pe, records, place.location)
            if inputs.absorb is not None:
                inputs.absorb()

        if _beside(spec, q, plan) and not narrow:
            side_by_side(index, absorb)
        else:
            index()
            absorb()
        if narrow:
            o, lse = ops.paged_mla(
                q,
                records,
                place.page_table,
                plan.batch.row,
                context,
                spec.scale,
                rank,
                dtype=q.dtype,
                width=plan.width,
            )
            return without_first(o, lse, context > 0) if spec.draft_width else o
        assert plan.cells is not None, "a layer that shares a selection comes behind an indexer"
        o, lse = ops.sparse_mla(q, records, plan.cells, context, spec.scale, rank, dtype=q.dtype)
        if not spec.draft_width:
            return o
        first = place.page_table[plan.batch.row, :1] * self._page_size
        return without_first(o, lse, (plan.cells == first).any(dim=1))

    def _store(self, layer: int, k: Tensor, location: Tensor) -> None:
        """Write the indexer's keys [T, D] of the step."""
        keys, form = self.pools.pages[layer][INDEX_KEY], self._index[layer]
        ops.index_k_store(k, keys, location, form.preshuffled, form.quantized, form.rotated)

    def _selected(self, layer: int, index: IndexInputs, topk: int, plan: MlaPlan) -> Tensor:
        """Cells [T, topk] int32 of the tokens with the best scores, then -1."""
        keys = IndexKeys(
            self.pools.pages[layer][INDEX_KEY],
            self._index[layer],
            plan.place.page_table,
            self._page_size,
            plan.batch.row,
            plan.context,
            plan.width,
        )
        return select_cells(index, keys, topk, plan.cuts.chunked)

    @property
    def _page_size(self) -> int:
        return self.pools.schema.page_size


def _beside(spec: MlaSpec, q: Tensor, plan: MlaPlan) -> bool:
    """Whether the indexer runs on a second stream: of decode steps, inside a graph."""
    wanted = spec.indexer is not None and spec.indexer.second_stream
    if not wanted or plan.cuts.chunked or len(q) > MAX_BESIDE or not q.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def _without_first(inputs: MlaInputs, slot: Tensor) -> MlaInputs:
    """For draft layers: the inputs with first slots cleared."""
    latent, k_pe = (cleared(lines, slot) for lines in (inputs.latent, inputs.k_pe))
    index = inputs.index
    if index is not None and index.k is not None:
        index = replace(index, k=cleared(index.k, slot))
    return replace(inputs, latent=latent, k_pe=k_pe, index=index)
