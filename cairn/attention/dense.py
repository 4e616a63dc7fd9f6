"""Full causal attention over the paged cache: the yardstick."""

from __future__ import annotations

from typing import ClassVar

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
        k_cache, v_cache = self.write(layer, inputs, plan)
        page_table = self.place(layer, plan).page_table

        def attend(part: Part) -> Tensor:
            o, _ = ops.dense_attention(
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
            return o

        chunked, stretches = plan.cuts.chunked, plan.stretches
        tiled = advice.dense_in_tiles(q, spec.num_kv_heads, chunked, stretches)
        return plan.attend(attend, tiled=tiled)
