"""The attention module: projections, norms and rotary around the backend's call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor, nn

from cairn.layers.linear import Linear
from cairn.layers.norm import RMSNorm
from cairn.layers.rotary import Rotary, rotate
from cairn.models.spec import HilsSpec, LayerSpec, ModelSpec


class AttentionBatch(Protocol):
    """What a model reads of a step; `cairn.attention.base.Batch` is one."""

    @property
    def input_ids(self) -> Tensor:
        """[T] int64, the landmark id at landmark slots."""
        ...

    @property
    def positions(self) -> Tensor:
        """[T] int64, rotary positions."""
        ...

    @property
    def completed(self) -> Tensor:
        """[N] int64, index in the batch of every slot that is the last of its page."""
        ...

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lmk_q: Tensor | None = None,
        summary_query: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer: -> [T, h_q, d]."""
        ...

    def memo(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """A value all layers of the step share."""
        ...


class Attention(nn.Module):
    """Self-attention of one layer.

    Args:
        spec: the model.
        index: layer number.
        rotary: of this layer, None: no position.
        dtype: of the parameters.
    """

    def __init__(
        self, spec: ModelSpec, index: int, rotary: Rotary | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        layer = spec.layers[index]
        self.index, self.head_dim, self.rotary = index, spec.head_dim, rotary
        self.hils: HilsSpec | None = spec.hils if layer.kind == "hils" else None
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        # Everything that reads the layer's input is one matrix; the split widths undo it.
        self.widths = [q_width, kv_width, kv_width]
        if self.hils is not None and self.hils.lmk_q is not None:
            self.widths.append(q_width if self.hils.lmk_q == "full" else self.hils.lora_rank)
        self.qkv = Linear(spec.hidden_size, sum(self.widths), layer.bias, dtype=dtype)
        self.out = Linear(q_width, spec.hidden_size, layer.bias, dtype=dtype)
        self.q_norm = self._norm(layer, q_width, dtype)
        self.k_norm = self._norm(layer, kv_width, dtype)
        self.lmk_q_up: Linear | None = None
        self.lmk_q_norm: RMSNorm | None = None
        self.q_c: nn.Parameter | None = None
        if self.hils is not None:
            self._add_landmark_query(spec, self.hils, layer, dtype)

    def _norm(self, layer: LayerSpec, width: int, dtype: torch.dtype) -> RMSNorm | None:
        if layer.qk_norm is None:
            return None
        return RMSNorm(
            width if layer.qk_norm == "full" else self.head_dim, layer.qk_eps, dtype=dtype
        )

    def _add_landmark_query(
        self, spec: ModelSpec, hils: HilsSpec, layer: LayerSpec, dtype: torch.dtype
    ) -> None:
        width = spec.num_heads * spec.head_dim
        if hils.lmk_q == "lora":
            self.lmk_q_up = Linear(hils.lora_rank, width, dtype=dtype)
        if hils.lmk_q is not None and not hils.shared_lmk_q_norm:
            norm = width if hils.lmk_q_norm == "full" else spec.head_dim
            self.lmk_q_norm = RMSNorm(norm, layer.qk_eps, dtype=dtype)
        if hils.shared_query:
            constant = torch.empty(spec.num_heads, spec.head_dim, dtype=dtype)
            self.q_c = nn.Parameter(constant, requires_grad=False)

    def forward(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        q0, k0, v0, *landmark = self.qkv(x).split(self.widths, dim=-1)
        q, k, v = self._normed(q0, self.q_norm), self._normed(k0, self.k_norm), self._heads(v0)
        z = self._landmark_query(q0, landmark[0]) if landmark else None
        index, cos_sin = self._angles(x, batch)
        if cos_sin is not None:
            rotate(index, q, k, cos_sin)
            if z is not None:
                rotate(index, z, None, cos_sin)
        if self.hils is None:
            o = batch.attend(self.index, q, k, v)
        else:
            z = q if z is None else z
            mu = self._summary_query(z, cos_sin, batch) if self.hils.needs_summary_query else None
            o = batch.attend(self.index, q, k, v, lmk_q=z, summary_query=mu)
        out: Tensor = self.out(o.flatten(1))
        return out

    def _angles(self, x: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor | None]:
        """Row numbers [T] and this layer's [cos | sin] by row, shared by the step's layers."""
        index = batch.memo(
            "rotary index", lambda: torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
        )
        rotary = self.rotary
        if rotary is None:
            return index, None
        key = (id(rotary), x.dtype)
        return index, batch.memo(key, lambda: rotary.cos_sin(batch.positions, x.dtype))

    def _landmark_query(self, q0: Tensor, projected: Tensor) -> Tensor:
        """z before rotation: the projection, or its low-rank form plus the raw query projection."""
        if self.lmk_q_up is not None:
            projected = self.lmk_q_up(projected) + q0
        return self._normed(projected, self.lmk_q_norm or self.q_norm)

    def _summary_query(self, z: Tensor, cos_sin: Tensor | None, batch: AttentionBatch) -> Tensor:
        """The prior query [N, h_q, d] of every page this step completes."""
        if self.q_c is None:
            return z[batch.completed]
        count = batch.completed.shape[0]
        constant = self.q_c.repeat(count, 1, 1)  # a copy even of one: it is rotated in place
        if cos_sin is not None:
            # At the position of the page's last slot, whose row `completed` is.
            rotate(batch.completed, constant, None, cos_sin)
        return constant

    def _normed(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """[T, h d] normed per head or over the whole width: [T, h, d]."""
        if norm is None:
            return self._heads(x)
        per_head = norm.weight.shape[0] == self.head_dim
        out: Tensor = norm(self._heads(x)) if per_head else self._heads(norm(x))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads
