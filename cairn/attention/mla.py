"""Latent attention over the paged cache, of all tokens or of those that an indexer selects.

The page of a layer holds a record [latent | rotary key] of each of its tokens, and in a layer with
an indexer a key for that. A *cell*, page * S + slot % S, is where a token is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, StepPlan
from cairn.attention.batch import Batch, PagePlace, StepRows
from cairn.attention.cuts import Cuts
from cairn.attention.inputs import IndexInputs, MlaInputs
from cairn.cache.pools import CachePools
from cairn.cache.schema import LayerSchema, PageField, PageFormat
from cairn.errors import BadConfig
from cairn.specs.backends import MLA
from cairn.specs.mla import MlaSpec

BLOCK_BYTES = 64 << 20
"""Of scores, or of cells of all tokens, that are made at once: they grow with the context."""
RECORD = "record"
INDEX_KEY = "index_key"


@dataclass(slots=True, kw_only=True)
class MlaPlan(StepPlan):
    """What latent attention derives from a step.

    Attributes:
        place: page table and locations, the same for all layers.
        context: [T] int32, tokens that a query sees: its own and all before; 0: padding.
        width: the most that any of them sees.
        cells: [T, topk] int32, of the tokens that queries selected in the last layer with an
            indexer, -1 behind them; None: nothing was selected yet.
    """

    place: PagePlace
    context: Tensor
    width: int
    cells: Tensor | None = None


class MlaBackend(AttentionBackend):
    """Softmax attention of all heads over the same records: all tokens', or the topk that the
    scores of an indexer choose for each query.

    A query that sees no more than topk tokens reads all of them; no score is made where that is
    true of a whole step.
    """

    name: ClassVar[str] = MLA
    in_graphs: ClassVar[bool] = False

    def __init__(self, pools: CachePools, layers: Mapping[int, MlaSpec]) -> None:
        super().__init__(pools, layers)
        groups = {pools.schema.group_of[layer] for layer in layers}
        (group,) = groups
        assert group is not None
        self._group = group

    @classmethod
    def needs(cls, spec: MlaSpec, form: PageFormat) -> LayerSchema:
        """A record of every token, and the indexer's key.

        Raises:
            BadConfig: for pages in 8 bits.
        """
        if form.quantized:
            raise BadConfig(
                "kv_cache_dtype is fp8_e4m3, but records of latent attention are kept in the "
                f"dtype of activations ({str(form.dtype).removeprefix('torch.')}) only",
                "Use --kv-cache-dtype auto",
            )
        fields = [PageField(RECORD, (form.page_size, spec.record_dim), form.dtype)]
        if spec.indexer is not None:
            shape = form.page_size, spec.indexer.head_dim
            fields.append(PageField(INDEX_KEY, shape, form.dtype))
        return LayerSchema(tuple(fields))

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> MlaPlan:
        """How much of its row each query sees."""
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
        spec, fields, q = self.layers[layer], self.pools.pages[layer], inputs.q
        location, index = plan.place.location, inputs.index
        ops.mla_kv_store(inputs.latent, inputs.k_pe, fields[RECORD], location)
        if index is not None:
            ops.index_k_store(index.k, fields[INDEX_KEY], location)

        def attend(cells: Tensor, part: slice) -> Tensor:
            width, context = spec.kv_lora_rank, plan.context[part]
            o, _ = ops.sparse_mla(
                q[part], fields[RECORD], cells, context, spec.scale, width, dtype=q.dtype
            )
            return o

        if spec.topk is None or plan.width <= spec.topk:
            parts = _blocks(len(q), plan.width)
            return torch.cat([attend(self._visible(plan, part), part) for part in parts])
        if index is not None:
            plan.cells = self._selected(index, fields[INDEX_KEY], spec.topk, plan)
        assert plan.cells is not None, "a layer that shares a selection comes behind an indexer"
        return attend(plan.cells, slice(None))

    def _selected(self, index: IndexInputs, keys: Tensor, topk: int, plan: MlaPlan) -> Tensor:
        """Cells [T, topk] int32 of the tokens with the best scores; -1 behind them."""
        table, row, context = plan.place.page_table, plan.batch.row, plan.context
        found = []
        for part in _blocks(len(context), plan.width):
            own, seen = row[part], context[part]
            logits = ops.paged_mqa_logits(
                index.q[part], index.weights[part], keys, table, own, seen, plan.width
            )
            found.append(ops.select_topk(logits, seen, topk, None, table, own, self._page_size))
        return torch.cat(found)

    def _visible(self, plan: MlaPlan, part: slice) -> Tensor:
        """Cells [n, width] int32 of all tokens that some queries see; -1 behind them."""
        size, row, context = self._page_size, plan.batch.row[part], plan.context[part]
        slot = torch.arange(plan.width, dtype=torch.int32, device=context.device)
        cells = plan.place.page_table[row][:, slot // size] * size + slot % size
        return cells.masked_fill_(slot >= context.unsqueeze(1), -1)

    @property
    def _page_size(self) -> int:
        return self.pools.schema.page_size


def _blocks(tokens: int, width: int) -> list[slice]:
    """So many queries in parts, of which 4 bytes for each of `width` tokens fit in BLOCK_BYTES."""
    most = max(1, BLOCK_BYTES // (4 * max(1, width)))
    return [slice(first, first + most) for first in range(0, max(1, tokens), most)]
