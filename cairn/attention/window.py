"""Attention over a local window of the paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, AttentionLayer, Batch, Part
from cairn.cache.pools import CacheSpec
from cairn.ops.attention.launch import in_tiles


class WindowBackend(AttentionBackend):
    """Every query reads the last slots of its row, itself included.

    A plain window layer sees exactly `window` slots. A landmark layer that is forced to its window
    alone sees what its window branch sees: aligned down to a page start, landmarks masked.
    """

    name: ClassVar[str] = "window"

    @classmethod
    def needs(cls, layer: AttentionLayer) -> CacheSpec:
        """Keys and values, under the window alone."""
        return replace(super().needs(layer), window=_width(layer))

    def place(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Those of the layers that have pages of their own, if there are such."""
        return batch.window_place or super().place(batch)

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: Batch,
        lmk_q: Tensor | None,
        summary_query: Tensor | None,
    ) -> Tensor:
        """Attend over the window of each query; shapes as in `Batch.attend`."""
        k_cache, v_cache = self.write(k, v, layer, batch)
        page_table, _ = self.place(batch)

        def attend(part: Part) -> Tensor:
            o, _ = ops.window_attention(
                part.of(q),
                k_cache,
                v_cache,
                part.row,
                part.slot,
                page_table,
                _width(layer),
                aligned=layer.landmark is not None,
                mask_landmarks=layer.mask_landmarks,
                dtype=q.dtype,
                chunked=part.chunked,
            )
            return o

        return batch.attend_parts(in_tiles(q, layer.num_kv_heads, batch.chunked), attend)


def _width(layer: AttentionLayer) -> int:
    """Slots of the layer's window."""
    window = layer.landmark.window if layer.landmark else layer.window
    if window is None:
        raise ValueError(f"layer {layer.index} has no window")
    return window
