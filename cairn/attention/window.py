"""Attention over a local window of the paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from cairn import ops
from cairn.attention.base import GqaBackend, StepPlan
from cairn.attention.cuts import Part
from cairn.attention.inputs import GqaInputs
from cairn.cache.schema import LayerSchema, PageFormat
from cairn.ops import planning
from cairn.specs.backends import WINDOW
from cairn.specs.gqa import GqaSpec


class WindowBackend(GqaBackend):
    """Every query reads the last slots of its row, itself included.

    A plain window layer sees exactly `window` slots. A landmark layer that is restricted to its
    window sees the same as its window branch: aligned down to a page start, landmarks masked.
    """

    name: ClassVar[str] = WINDOW

    @classmethod
    def needs(cls, spec: GqaSpec, form: PageFormat) -> LayerSchema:
        """Keys and values, within the window only."""
        pages = super().needs(spec, form).pages
        return LayerSchema(tuple(replace(entry, window=spec.window) for entry in pages))

    def run(self, layer: int, inputs: GqaInputs, plan: StepPlan) -> Tensor:
        """Attend over the window of each query: -> [T, h_q, d] in q's dtype."""
        spec, q = self.layers[layer], inputs.q
        k_cache, v_cache = self.write(layer, inputs, plan)
        page_table = self.place(layer, plan).page_table

        def attend(part: Part) -> Tensor:
            o, _ = ops.window_attention(
                part.of(q),
                k_cache,
                v_cache,
                part.row,
                part.slot,
                page_table,
                spec.window,
                scale=spec.scale,
                aligned=spec.aligned,
                mask_landmarks=spec.mask_landmarks,
                dtype=q.dtype,
                chunked=part.chunked,
            )
            return o

        tiled = planning.in_tiles(q, spec.num_kv_heads, plan.cuts.chunked)
        return plan.attend(attend, tiled=tiled)
