"""Mixture of experts: a router, the experts that it chooses, and one that every token runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.distributed.groups import ALONE, Group
from cairn.layers.expert_places import ExpertPlaces
from cairn.layers.linear import PLAIN, ExpertLinear, Experts
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
        group: ranks, each of which has a part of every expert, or some experts. All have every
            token and choose alike, so nothing is sent before the sum.

    Attributes:
        places: which experts the ranks hold; None: each has a part of all.
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
        self.places: ExpertPlaces | None = None
        if spec.placement and not group.alone:
            self.places = ExpertPlaces(spec.placement, spec.experts, group)
        experts = Experts(spec.experts, None if self.places is None else self.places.held)
        self.gate_up = ExpertLinear(experts, hidden, up, "gate_up_proj", dtype=dtype, scheme=routed)
        self.down = ExpertLinear(
            experts, spec.intermediate, down, "down_proj", dtype=dtype, scheme=routed
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
        if self.places is not None:
            assert h.slots is not None, "copies of experts take turns by slots"
            ids = self.places.own(ids, h.slots)
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
