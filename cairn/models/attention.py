"""The attention module: projections, norms and rotary around the backend's call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor, nn

from cairn import ops
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
        k: Tensor | None,
        v: Tensor | None,
        lmk_q: Tensor | None = None,
        summary_query: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer: -> [T, h_q, d]."""
        ...

    def target(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where a model may put keys and values itself: k_cache, v_cache and location [T]."""
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
        if self.hils is not None and self.hils.lmk_q == "full":
            self.widths.insert(2, q_width)
        if self.hils is not None and self.hils.lmk_q == "lora":
            self.widths.append(self.hils.lora_rank)
        self.qkv = Linear(spec.hidden_size, sum(self.widths), layer.bias, dtype=dtype)
        self.out = Linear(q_width, spec.hidden_size, layer.bias, dtype=dtype)
        self.q_norm = self._norm(layer, q_width, dtype)
        self.k_norm = self._norm(layer, kv_width, dtype)
        self.lmk_q_up: Linear | None = None
        self.lmk_q_norm: RMSNorm | None = None
        self.q_c: nn.Parameter | None = None
        if self.hils is not None:
            self._add_landmark_query(spec, self.hils, layer, dtype)
        # First and last + 1 head of q, k and z where they lie side by side.
        own = self.hils is not None and self.hils.lmk_q is not None
        ends = [spec.num_heads, spec.num_heads + spec.num_kv_heads]
        ends += [ends[-1] + spec.num_heads] * own
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.eps = layer.qk_eps
        widths = [norm and norm.weight.shape[0] for norm in self._norms()]
        spans = [(b - a) * self.head_dim for a, b in self.spans]
        # Every head has its norm, or all heads of q, of k and of z have one each.
        self.by_head = all(width == self.head_dim for width in widths)
        self.whole = not self.by_head and widths == spans
        self._weights: Tensor | None = None

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

    def forward(self, x: Tensor, batch: AttentionBatch, norm: RMSNorm | None = None) -> Tensor:
        """x [T, hidden], normed first if there is a norm, -> [T, h_q d], which `out` takes."""
        cos_sin = self._angles(x, batch)
        q, k, v, z = self._project(self.qkv(x, norm), cos_sin, batch)
        if self.hils is None:
            return batch.attend(self.index, q, k, v).flatten(1)
        mu = self._summary_query(cos_sin, batch)
        return batch.attend(self.index, q, k, v, lmk_q=z, summary_query=mu).flatten(1)

    def _angles(self, x: Tensor, batch: AttentionBatch) -> Tensor | None:
        """This layer's [cos | sin] by row, shared by the step's layers."""
        rotary = self.rotary
        if rotary is None:
            return None
        return batch.memo((id(rotary), x.dtype), lambda: rotary.cos_sin(batch.positions, x.dtype))

    def _summary_query(self, cos_sin: Tensor | None, batch: AttentionBatch) -> Tensor | None:
        """The prior query [N, h_q, d] of every page this step completes; None: its landmark's z."""
        if self.q_c is None:
            return None
        count = batch.completed.shape[0]
        constant = self.q_c.repeat(count, 1, 1)  # a copy even of one: it is rotated in place
        if cos_sin is not None:
            # At the position of the page's last slot, whose row `completed` is.
            rotate(batch.completed, constant, None, cos_sin)
        return constant

    def _project(
        self, projected: Tensor, cos_sin: Tensor | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """q, k, v, z; q, k, z after norm and rotation. z is q where it has no projection; k and v
        are None where they are in the cache already."""
        added: Tensor | None = None
        if self.lmk_q_up is not None:
            # The raw query projection is added to the low-rank form, before any norm.
            added = self.lmk_q_up(projected[:, -self.widths[-1] :])
        weight = self._head_weights()
        if weight is not None:
            q_heads, kv_heads = (b - a for a, b in self.spans[:2])
            target = batch.target(self.index)
            if target is not None:
                q, z = ops.heads_into_cache(
                    projected, added, weight, cos_sin, *target, q_heads, self.eps, self.whole
                )
                return q, None, None, z if len(self.spans) > 2 else q
            q, k, z = ops.split_norm_rope(
                projected, added, weight, cos_sin, q_heads, kv_heads, self.eps, self.whole
            )
            return q, k, self._values(projected), z if len(self.spans) > 2 else q
        parts = [
            self._normed_span(part, norm)
            for part, norm in zip(self._parts(projected, added), self._norms(), strict=True)
        ]
        if cos_sin is not None:
            count, device = projected.shape[0], projected.device
            index = batch.memo(
                "rotary index", lambda: torch.arange(count, dtype=torch.int64, device=device)
            )
            for part in parts:
                rotate(index, part, None, cos_sin)
        z = parts[-1] if len(parts) > 2 else parts[0]
        return parts[0], parts[1], self._values(projected), z

    def _values(self, projected: Tensor) -> Tensor:
        """Heads of v [T, h_kv, d], behind those of q, k and z."""
        first = sum(self.widths[:2]) if self.lmk_q_up is not None else sum(self.widths[:-1])
        behind = projected[:, first : first + self.widths[1]]
        heads: Tensor = behind.unflatten(-1, (-1, self.head_dim))
        return heads

    def _parts(self, projected: Tensor, added: Tensor | None) -> list[Tensor]:
        """Heads of q, k and (with a projection of its own) z, each [T, h, d] in its own memory."""
        found = [
            projected[:, a * self.head_dim : b * self.head_dim].contiguous()
            for a, b in (self.spans if added is None else self.spans[:2])
        ]
        if added is not None:
            found.append(added + found[0])
        heads: list[Tensor] = [part.unflatten(-1, (-1, self.head_dim)) for part in found]
        return heads

    def _normed_span(self, heads: Tensor, norm: RMSNorm | None) -> Tensor:
        """One of q, k, z [T, h, d] normed by head or over its whole width."""
        if norm is None:
            return heads
        per_head = norm.weight.shape[0] == self.head_dim
        normed: Tensor = norm(heads) if per_head else norm(heads.flatten(1)).view_as(heads)
        return normed

    def _norms(self) -> list[RMSNorm | None]:
        """Norms of q, k and z, as many as there are spans."""
        return [self.q_norm, self.k_norm, self.lmk_q_norm or self.q_norm][: len(self.spans)]

    def _head_weights(self) -> Tensor | None:
        """Norm weight of every head of the spans [H, d]; None where there are none, or of both
        kinds."""
        if not (self.by_head or self.whole):
            return None
        if self._weights is None:
            rows = [
                norm.weight.view(-1, self.head_dim).expand(b - a, -1)
                for (a, b), norm in zip(self.spans, self._norms(), strict=True)
                if norm is not None
            ]
            weights = torch.cat(rows)
            # The CPU computes in float32: one conversion instead of one a step.
            self._weights = weights if weights.is_cuda else weights.float()
        return self._weights
