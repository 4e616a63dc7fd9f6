"""Landmark attention: grouped-query attention with a second query that scores pages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn.attention.inputs import HilsInputs
from cairn.attention.step import BoundLayer
from cairn.distributed.groups import ALONE, Group
from cairn.layers.gqa import GqaAttention
from cairn.layers.linear import PLAIN, Linear
from cairn.layers.norm import RMSNorm
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.rotary import Angles, Rotary
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec


class HilsAttention(GqaAttention):
    """Self-attention of one landmark layer.

    The landmark query z has its own rows after k in the joint matrix; or it is the raw query plus a
    low-rank product, whose first factor comes after v; or it is the query itself.
    """

    def __init__(
        self,
        spec: HilsSpec,
        hidden: int,
        rotary: Rotary | None,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__(spec, hidden, rotary, dtype, scheme, group)
        self.lmk_q_up: Linear | None = None
        self.lmk_q_norm: RMSNorm | None = None
        self.q_c: nn.Parameter | None = None
        self.lora_rank = spec.lora_rank
        if spec.lmk_q == "lora":
            up = [Rows("lmk_q_proj.1", self.q_width)]
            self.lmk_q_up = Linear(spec.lora_rank, up, dtype=dtype, scheme=scheme)
        if spec.lmk_q is not None and not spec.shared_lmk_q_norm:
            self.lmk_q_norm = self._norm_of(spec, spec.lmk_q_norm, self.q_width, dtype)
        if spec.shared_query:
            constant = torch.empty(spec.num_heads, spec.head_dim, dtype=dtype)
            self.q_c = nn.Parameter(constant, requires_grad=False)
        if spec.lmk_q is not None:
            begin = self.spans[-1][1]
            self.spans.append((begin, begin + spec.num_heads))
        if spec.lmk_q == "full":
            self.v_first += self.q_width
        self.fused = self._fuses(spec)

    def _parts_of(self, spec: GqaSpec) -> list[Rows]:
        q, k, v = super()._parts_of(spec)
        assert isinstance(spec, HilsSpec)
        if spec.lmk_q == "full":
            return [q, k, Rows("lmk_q_proj", self.q_width), v]
        if spec.lmk_q == "lora":
            return [q, k, v, Rows("lmk_q_proj.0", spec.lora_rank)]
        return [q, k, v]

    def weights(self, source: Source) -> list[Weight]:
        """Those of grouped-query attention, and the landmark query's."""
        found = super().weights(source)
        if self.lmk_q_up is not None:
            found += self.lmk_q_up.weights(source)
        if self.lmk_q_norm is not None:
            found += self.lmk_q_norm.weights(source, "lmk_q_norm")
        if self.q_c is not None:
            shape = tuple(self.q_c.shape)
            found.append(Weight(source.name("q_c"), shape, self.q_c, draw="unit"))
        return found

    def forward(self, h: Hidden, layer: BoundLayer, angles: Angles) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        cos_sin = None if self.rotary is None else angles.of(self.rotary)
        q, k, v, z = self._project(self.qkv(h.x, h.norm), cos_sin, layer, angles)
        mu = self._summary_query(cos_sin, layer.completed)
        return Product(self.out, layer.run(HilsInputs(q, k, v, z, mu))[:, self.own].flatten(1))

    def _added(self, projected: Tensor) -> Tensor | None:
        if self.lmk_q_up is None:
            return None
        # The raw query projection is added to the low-rank form, before any norm.
        added: Tensor = self.lmk_q_up(projected[:, -self.lora_rank :])
        return added

    def _norms(self) -> list[RMSNorm | None]:
        # The base class's constructor calls this before lmk_q_norm exists.
        norms = [self.q_norm, self.k_norm, getattr(self, "lmk_q_norm", None) or self.q_norm]
        return norms[: len(self.spans)]

    def _summary_query(self, cos_sin: Tensor | None, completed: Tensor) -> Tensor | None:
        """The prior query [N, h_q, d] of every page this step completes; None: its landmark's z."""
        if self.q_c is None:
            return None
        constant = self.q_c.repeat(
            len(completed), 1, 1
        )  # a copy even for one page: rotation is in place
        if cos_sin is not None and self.rotary is not None:
            # Rotated to the position of the page's last slot, which `completed` indexes.
            self.rotary.rotate(completed, constant, None, cos_sin)
        return constant
