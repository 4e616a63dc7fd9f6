"""Full causal attention over the paged cache: the yardstick."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import GqaBackend, StepPlan
from cairn.attention.cuts import Part
from cairn.attention.inputs import GqaInputs
from cairn.ops import advice
from cairn.specs.backends import DENSE


class DenseBackend(GqaBackend):
    """Every query reads every earlier slot of its row."""

    name: ClassVar[str] = DENSE
    longest_in_graphs: ClassVar[int | None] = 4096

    def run(self, layer: int, inputs: GqaInputs, plan: StepPlan) -> Tensor:
        """Attend over slots 0 .. s of the row: -> [T, h_q, d] in q's dtype."""
        spec, q = self.layers[layer], inputs.q
        first = plan.batch.slot <= 0 if spec.draft_width else None
        if first is not None:
            inputs = _without_first(inputs, first)
        k_cache, v_cache = self.write(layer, inputs, plan)
        page_table = self.place(layer, plan).page_table

        def attend(part: Part) -> Tensor:
            o, lse = ops.dense_attention(
                part.of(q),
                k_cache,
                v_cache,
                part.row,
                part.slot,
                page_table,
                scale=spec.scale,
                mask_landmarks=spec.mask_landmarks,
                stretches=part.stretches,
                chunked=part.chunked,
            )
            return o if first is None else _apart_from_first(o, lse, part.slot)

        chunked, stretches = plan.cuts.chunked, plan.stretches
        tiled = advice.dense_in_tiles(q, spec.num_kv_heads, chunked, stretches)
        return plan.attend(attend, tiled=tiled)

    def kv_target(self, layer: int, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor] | None:
        """Not of a draft layer, whose first slot is written here."""
        return None if self.layers[layer].draft_width else super().kv_target(layer, plan)


def _without_first(inputs: GqaInputs, first: Tensor) -> GqaInputs:
    """Key and value 0 where `first` [T] says that a slot is no key."""
    assert inputs.k is not None and inputs.v is not None
    none = first[:, None, None]
    return replace(inputs, k=inputs.k.masked_fill(none, 0), v=inputs.v.masked_fill(none, 0))


def _apart_from_first(o: Tensor, lse: Tensor, slot: Tensor) -> Tensor:
    """Attention [n, h_q, d] over slots 1 .. slot, from that over 0 .. slot: a key of 0 has e^0 of
    the sum e^lse, and a value of 0 adds nothing. 0 where there is no other slot."""
    share = -torch.expm1(-lse)
    others = (slot[:, None] > 0) & (share > 0)
    return (o / share.masked_fill(~others, torch.inf)[..., None]).to(o.dtype)
