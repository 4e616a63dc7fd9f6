"""Full causal attention over the paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from cairn import ops
from cairn.attention.base import GqaBackend, StepPlan
from cairn.attention.cuts import Part
from cairn.attention.first_slot import cleared, draft_fields, without_first
from cairn.attention.inputs import GqaInputs
from cairn.cache.schema import LayerSchema, PageFormat
from cairn.ops import planning
from cairn.specs.backends import DENSE
from cairn.specs.gqa import GqaSpec


class DenseBackend(GqaBackend):
    """Every query reads every earlier slot of its row."""

    name: ClassVar[str] = DENSE
    longest_in_graphs: ClassVar[int | None] = 4096

    @classmethod
    def needs(cls, spec: GqaSpec, form: PageFormat) -> LayerSchema:
        """Keys and values, and of a draft layer hidden states."""
        fields = form.keys_and_values(spec.num_kv_heads, spec.head_dim)
        return LayerSchema((*fields, *draft_fields(spec.draft_width, form)))

    def run(self, layer: int, inputs: GqaInputs, plan: StepPlan) -> Tensor:
        """Attend over slots 0 .. s of the row: -> [T, h_q, d] in q's dtype."""
        spec, q = self.layers[layer], inputs.q
        if spec.draft_width:
            assert inputs.k is not None and inputs.v is not None
            k, v = (cleared(lines, plan.batch.slot) for lines in (inputs.k, inputs.v))
            inputs = replace(inputs, k=k, v=v)
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
                segments=part.segments,
                chunked=part.chunked,
            )
            return without_first(o, lse, part.slot >= 0) if spec.draft_width else o

        chunked, segments = plan.cuts.chunked, plan.segments
        tiled = planning.dense_in_tiles(q, spec.num_kv_heads, chunked, segments)
        return plan.attend(attend, tiled=tiled)

    def kv_target(self, layer: int, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor] | None:
        """None for a draft layer: the backend writes its first slot."""
        return None if self.layers[layer].draft_width else super().kv_target(layer, plan)
