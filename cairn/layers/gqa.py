"""Grouped-query attention: projections, norms and rotary around the backend's call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.attention.inputs import GqaInputs
from cairn.attention.step import BoundLayer
from cairn.distributed.groups import ALONE, Group
from cairn.layers.linear import PLAIN, Linear
from cairn.layers.norm import DividedNorm, RMSNorm
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.rotary import Angles, Rotary
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.gqa import GqaSpec, NormWidth


class GqaAttention(nn.Module):
    """Self-attention of one layer.

    All projections of the layer's input are one matrix; its rows are the heads of q (each followed
    by its gate if there are gates), of k, then a subclass's additional heads, then of v.

    Args:
        spec: heads, norms and rotary.
        hidden: width of the residual stream.
        rotary: of this layer; None: no rotary embedding.
        dtype: of activations.
        scheme: storage of the weight matrices.
        group: tensor-parallel ranks, which divide the heads; `spec` has one rank's share.
    """

    def __init__(
        self,
        spec: GqaSpec,
        hidden: int,
        rotary: Rotary | None,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.head_dim, self.rotary, self.group = spec.head_dim, rotary, group
        self.q_width = spec.num_heads * spec.head_dim
        self.kv_width = spec.num_kv_heads * spec.head_dim
        self.output_gate = spec.output_gate
        joint, out = self._parts_of(spec), [Rows("o_proj", hidden)]
        self.qkv = Linear(hidden, joint, spec.bias, dtype=dtype, scheme=scheme)
        # Projected heads: one rank's share of those computed by ranks with the same KV head.
        projected = spec.out_heads or spec.num_heads
        begin = group.rank % (spec.num_heads // projected) * projected
        self.own, width = slice(begin, begin + projected), projected * spec.head_dim
        self.out = Linear(width, out, spec.out_bias, dtype=dtype, scheme=scheme, group=group)
        self.q_norm = self._norm_of(spec, spec.qk_norm, self.q_width, dtype)
        self.k_norm = self._norm_of(spec, spec.qk_norm, self.kv_width, dtype)
        # [begin, end) of the heads of q, of k and of a subclass's additional heads, in the fused
        # projection.
        q, kv = spec.num_heads, spec.num_kv_heads
        self.spans = [(0, q), (q, q + kv)]
        self.v_first = self.q_width + self.kv_width
        self.eps = spec.qk_eps
        self.by_head = self.divided = False
        self.fused = self._fuses(spec)
        self._head_weight: Tensor | None = None

    def _parts_of(self, spec: GqaSpec) -> list[Rows]:
        """Rows of the joint matrix."""
        q = self.q_width * (2 if spec.output_gate else 1)
        return [Rows("q_proj", q), Rows("k_proj", self.kv_width), Rows("v_proj", self.kv_width)]

    def _norm_of(
        self, spec: GqaSpec, width: NormWidth | None, full: int, dtype: torch.dtype
    ) -> RMSNorm | None:
        if width is None:
            return None
        if width == "full" and not self.group.alone:
            return DividedNorm(
                full, spec.qk_eps, dtype=dtype, unit_offset=spec.unit_offset, group=self.group
            )
        size = full if width == "full" else self.head_dim
        return RMSNorm(size, spec.qk_eps, dtype=dtype, unit_offset=spec.unit_offset)

    def _fuses(self, spec: GqaSpec) -> bool:
        """Whether one op splits, norms and rotates: every head has its norm, or all heads of q, of
        k and of further spans have one each; all dimensions rotate, in halves; no gates."""
        norms = self._norms()
        if spec.output_gate or spec.qk_norm is None:
            return False
        if self.rotary is not None:
            whole = self.rotary.dim == self.head_dim
            if not whole or self.rotary.spec.interleaved:
                return False
        widths = [norm.weight.shape[0] if norm is not None else 0 for norm in norms]
        spans = [(b - a) * self.head_dim for a, b in self.spans]
        self.divided = any(isinstance(norm, DividedNorm) for norm in norms)
        self.by_head = not self.divided and all(width == self.head_dim for width in widths)
        return self.by_head or widths == spans

    def weights(self, source: Source) -> list[Weight]:
        """q_proj, k_proj, v_proj, o_proj, and the norms of q and k."""
        found = self.qkv.weights(source) + self.out.weights(source)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                found += norm.weights(source, name)
        return found

    def forward(self, h: Hidden, layer: BoundLayer, angles: Angles) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        cos_sin = None if self.rotary is None else angles.of(self.rotary)
        projected = self.qkv(h.x, h.norm)
        if self.output_gate:
            return Product(self.out, self._gated(projected, cos_sin, layer, angles).flatten(1))
        q, k, v, _ = self._project(projected, cos_sin, layer, angles)
        return Product(self.out, layer.run(GqaInputs(q, k, v)).flatten(1))

    def _gated(
        self, projected: Tensor, cos_sin: Tensor | None, layer: BoundLayer, angles: Angles
    ) -> Tensor:
        """The attention output times the heads' gates: [T, h_q, d]. In the projection a head's gate
        follows its query."""
        both, rest = projected.split((2 * self.q_width, 2 * self.kv_width), dim=-1)
        q, gate = both.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)
        k, v = rest.unflatten(-1, (2, -1, self.head_dim)).unbind(1)
        q, k = self._turned([q, k], cos_sin, angles)
        gated: Tensor = ops.sigmoid_gate_mul(layer.run(GqaInputs(q, k, v)), gate)
        return gated

    def _project(
        self, projected: Tensor, cos_sin: Tensor | None, layer: BoundLayer, angles: Angles
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """q, k, v and the last span; all but v after norm and rotation. k and v are None if they
        have been written to the cache already."""
        added = self._added(projected)
        if not self.fused:
            return self._project_apart(projected, added, cos_sin, angles)
        q_heads, kv_heads = (b - a for a, b in self.spans[:2])
        weight = self._head_weights()
        norms = self.eps, not self.by_head, self._means(projected, added)
        target = layer.kv_target()
        if target is not None:
            q, z = ops.heads_into_cache(projected, added, weight, cos_sin, *target, q_heads, *norms)
            return q, None, None, z if len(self.spans) > 2 else q
        q, k, z = ops.split_norm_rope(projected, added, weight, cos_sin, q_heads, kv_heads, *norms)
        return q, k, self._values(projected), z if len(self.spans) > 2 else q

    def _means(self, projected: Tensor, added: Tensor | None) -> Tensor | None:
        """Mean squares [T, spans] of the heads of all ranks; None: each rank norms its own."""
        if not self.divided:
            return None
        q_heads, kv_heads = (b - a for a, b in self.spans[:2])
        query, ranks = len(self.spans) > 2 and added is None, self.group.size
        own = ops.head_squares(projected, added, q_heads, kv_heads, self.head_dim, query, ranks)
        return self.group.sum(own)

    def _project_apart(
        self, projected: Tensor, added: Tensor | None, cos_sin: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `_project`, with separate ops for each span."""
        heads = self._turned(self._heads(projected, added), cos_sin, angles)
        return heads[0], heads[1], self._values(projected), heads[2 if len(heads) > 2 else 0]

    def _turned(
        self, spans: Sequence[Tensor], cos_sin: Tensor | None, angles: Angles
    ) -> list[Tensor]:
        """Spans of heads [T, h, d] after norm and rotation."""
        norms = zip(self.spans, self._norms(), strict=True)
        done: list[Tensor] = []
        for heads, ((begin, end), norm) in zip(spans, norms, strict=True):
            if self._one_op(norm):
                weight = self._head_weights()[begin:end]
                done.append(ops.head_norm_rope(heads, weight, cos_sin, self.eps))
                continue
            # Rotation is in place.
            part = self._normed(heads.contiguous(), norm)
            if cos_sin is not None and self.rotary is not None:
                self.rotary.rotate(angles.index, part, None, cos_sin)
            done.append(part)
        return done

    def _one_op(self, norm: RMSNorm | None) -> bool:
        """Whether one op norms the heads of a span and rotates them: each has its norm, and the
        dimensions that rotate do so in halves."""
        if norm is None or isinstance(norm, DividedNorm) or norm.weight.shape[0] != self.head_dim:
            return False
        return self.rotary is None or not self.rotary.spec.interleaved

    def _added(self, projected: Tensor) -> Tensor | None:
        """The addend that makes q's projection that of the last span [T, h_q d]; None: that span
        has its own rows, or there is none."""
        return None

    def _values(self, projected: Tensor) -> Tensor:
        """Heads of v [T, h_kv, d]."""
        first = self.v_first
        columns = projected[:, first : first + self.kv_width]
        heads: Tensor = columns.unflatten(-1, (-1, self.head_dim))
        return heads

    def _heads(self, projected: Tensor, added: Tensor | None) -> list[Tensor]:
        """Heads of each span [T, h, d]."""
        found = [
            projected[:, a * self.head_dim : b * self.head_dim]
            for a, b in (self.spans if added is None else self.spans[:2])
        ]
        if added is not None:
            found.append(added + found[0])
        heads: list[Tensor] = [part.unflatten(-1, (-1, self.head_dim)) for part in found]
        return heads

    def _normed(self, heads: Tensor, norm: RMSNorm | None) -> Tensor:
        """A span [T, h, d] normed by head or over its whole width."""
        if norm is None:
            return heads
        by_head = norm.weight.shape[0] == self.head_dim
        normed: Tensor = norm(heads) if by_head else norm(heads.flatten(1)).view_as(heads)
        return normed

    def _norms(self) -> list[RMSNorm | None]:
        """Norms of the spans."""
        return [self.q_norm, self.k_norm]

    def _head_weights(self) -> Tensor:
        """Norm weight of every head of the spans [H, d]."""
        if self._head_weight is None:
            rows = [
                norm.weight.view(-1, self.head_dim).expand(b - a, -1)
                for (a, b), norm in zip(self.spans, self._norms(), strict=True)
                if norm is not None
            ]
            weights = torch.cat(rows)
            # On the CPU norms run in float32: convert the weight once instead of in every step.
            self._head_weight = weights if weights.is_cuda else weights.float()
        return self._head_weight
