"""Full causal attention over the paged cache: the yardstick."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, AttentionLayer, Batch, Part
from cairn.ops.attention.launch import dense_in_tiles


class DenseBackend(AttentionBackend):
    """Every query reads every earlier slot of its row."""

    name: ClassVar[str] = "dense"
    longest_in_graphs: ClassVar[int | None] = 4096

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
        """Attend over slots 0 .. s of the row; shapes as in `Batch.attend`."""
        k_cache, v_cache = self.write(k, v, layer, batch)

        def attend(part: Part) -> Tensor:
            o, _ = ops.dense_attention(
                part.of(q),
                k_cache,
                v_cache,
                part.row,
                part.slot,
                batch.page_table,
                mask_landmarks=layer.mask_landmarks,
                stretches=part.stretches,
                chunked=part.chunked,
            )
            return o

        tiled = dense_in_tiles(q, layer.num_kv_heads, batch.chunked, batch.stretches)
        return batch.attend_parts(tiled, attend)
