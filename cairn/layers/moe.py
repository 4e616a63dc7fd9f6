"""Mixture of experts: a router, the experts that it chooses, and one that every token runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.distributed.groups import ALONE, Group
from cairn.layers.linear import PLAIN, ExpertLinear
from cairn.layers.mlp import GatedMLP
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.router import Router
from cairn.layers.schemes.base import Chosen, Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.ffn import DenseFfn, MoeFfn


class MixtureOfExperts(nn.Module):
    """Sum over the chosen experts of weight * down(silu(gate x) * up x), and the shared expert.

    Args:
        spec: experts, router and shared expert.
        hidden: width of x.
        dtype: of activations.
        scheme: how the experts' matrices are kept.
        group: ranks, each of which has a part of every expert. They choose alike, so nothing is
            sent before the sum.
    """

    def __init__(
        self,
        spec: MoeFfn,
        hidden: int,
        *,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.spec, self.group = spec, group
        self.router = Router(spec.router, hidden, spec.experts, spec.active, dtype)
        names = spec.names
        up = [Rows(names.gate, spec.intermediate), Rows(names.up, spec.intermediate)]
        down = [Rows(names.down, hidden)]
        # Both products of an expert are computed together.
        routed = scheme.within("experts").of([*up, *down], experts=True)
        self.gate_up = ExpertLinear(
            spec.experts, hidden, up, "gate_up_proj", dtype=dtype, scheme=routed
        )
        self.down = ExpertLinear(
            spec.experts, spec.intermediate, down, "down_proj", dtype=dtype, scheme=routed
        )
        self.shared: GatedMLP | None = None
        self.shared_gate: nn.Parameter | None = None
        if spec.shared:
            own = scheme.within(spec.shared_name)
            expert = DenseFfn(spec.shared, limit=spec.limit, names=names)
            self.shared = GatedMLP(hidden, expert, dtype=dtype, scheme=own)
        if spec.shared_gate:
            gate = torch.empty(1, hidden, dtype=dtype)
            self.shared_gate = nn.Parameter(gate, requires_grad=False)

    def weights(self, source: Source) -> list[Weight]:
        """gate, experts.*, and the shared expert with its gate."""
        found, experts = self.router.weights(source), source.within("experts")
        found += self.gate_up.weights(experts) + self.down.weights(experts)
        name = self.spec.shared_name
        if self.shared is not None:
            found += self.shared.weights(source.within(name))
        if self.shared_gate is not None:
            shape = tuple(self.shared_gate.shape)
            gate = Weight(source.name(f"{name}_gate.weight"), shape, self.shared_gate)
            found.append(gate)
        return found

    def forward(self, h: Hidden) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        x = h.value()
        weights, ids = self.router(x, h.ids)
        chosen = Chosen(weights, ids, self.spec.limit)
        delta = self.gate_up.scheme.experts(self.gate_up, self.down, x, chosen)
        return self.group.sum(delta if self.shared is None else delta + self._shared(x))

    def _shared(self, x: Tensor) -> Tensor:
        """The shared expert, gated if it has a gate."""
        assert self.shared is not None
        delta = self.shared(Hidden(x))
        y: Tensor = delta.value() if isinstance(delta, Product) else delta
        if self.shared_gate is None:
            return y
        return y * ops.linear(x, self.shared_gate).sigmoid()
