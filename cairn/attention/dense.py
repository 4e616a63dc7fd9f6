"""Full causal attention over the paged cache: the yardstick."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, AttentionLayer, Batch


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
        o, _ = ops.dense_attention(
            q,
            k_cache,
            v_cache,
            batch.row,
            batch.slot,
            batch.page_table,
            mask_landmarks=layer.mask_landmarks,
            stretches=batch.stretches,
            chunked=batch.chunked,
        )
        return o
