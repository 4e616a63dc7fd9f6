"""Mixture of experts: a router, the routed experts, and a shared expert that every token runs.

The shared expert is a part of the grouped products where it can be: it is as wide as one or several
routed experts, and its matrices are stored like theirs; with expert parallelism each rank's part of
it is. Else it is a gated MLP of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn.distributed.groups import ALONE, Group
from cairn.distributed.rounds import Rounds
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
        scheme: storage of the experts' matrices.
        group: ranks, each of which has a part of every expert, or some experts. All have every
            token and compute the same routing, so the only communication is the sum.
        rounds: engines that share the experts, each with its own tokens, which are all-gathered in
            a round; None: this engine (or its ranks) has all experts.

    Attributes:
        places: which experts the ranks or engines hold; None: each has a part of all.
        shared: the shared expert, if it is a separate MLP.
    """

    def __init__(
        self,
        spec: MoeFfn,
        hidden: int,
        group: Group = ALONE,
        rounds: Rounds | None = None,
        *,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
    ) -> None:
        super().__init__()
        self.spec, self.group, self.rounds = spec, group, rounds
        sharing = group if rounds is None else rounds.group
        names = spec.names
        up = [Rows(names.gate, spec.intermediate), Rows(names.up, spec.intermediate)]
        down = [Rows(names.down, hidden)]
        # Both products of an expert are computed together.
        routed = scheme.within("experts").of([*up, *down], experts=True)
        own = scheme.within(spec.shared_name)
        joined = _joined(spec, group, routed, own.of([*up, *down], experts=True))
        self.places: ExpertPlaces | None = None
        if spec.placement and not sharing.alone:
            self.places = ExpertPlaces(spec.placement, spec.experts, sharing, joined)
        held = None if self.places is None else self.places.held
        experts = Experts(spec.experts, held, joined)
        # The router's matrix has the shared expert's gate also if the shared expert is a separate
        # MLP.
        self.router = Router(spec, hidden, dtype, joined or int(spec.shared_gate))
        self.gate_up = ExpertLinear(experts, hidden, up, "gate_up_proj", dtype=dtype, scheme=routed)
        self.down = ExpertLinear(
            experts, spec.intermediate, down, "down_proj", dtype=dtype, scheme=routed
        )
        self.shared: GatedMLP | None = None
        if spec.shared and not joined:
            expert = DenseFfn(spec.shared, limit=spec.limit, names=names)
            self.shared = GatedMLP(hidden, expert, dtype=dtype, scheme=own)

    def weights(self, source: Source) -> list[Weight]:
        """gate, experts.*, and the shared expert with its gate."""
        found, experts = self.router.weights(source), source.within("experts")
        found += self.gate_up.weights(experts) + self.down.weights(experts)
        name = self.spec.shared_name
        own = source.within(name)
        if self.shared is not None:
            found += self.shared.weights(own)
        elif self.spec.shared:
            found += self.gate_up.shared_weights(own, axis=0) + self.down.shared_weights(
                own, axis=1
            )
        return found + self.router.shared_gate_weights(source, name)

    def forward(self, h: Hidden) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        x = h.value()
        weights, ids = self.router(x, h.ids)
        share: Tensor | None = None
        if self.shared is not None and self.spec.shared_gate:
            weights, share = weights.tensor_split([self.spec.active], dim=1)
            weights, ids = weights.contiguous(), ids[:, : self.spec.active].contiguous()
        if self.rounds is not None:
            assert h.slots is not None, "copies of experts take turns by slots"
            delta = self._in_round(self.rounds, x, weights, ids, h.slots)
            return delta if self.shared is None else delta + self._shared(x, share)
        if self.places is not None:
            assert h.slots is not None, "copies of experts take turns by slots"
            ids = self.places.own(ids, h.slots)
        delta = self._experts(x, weights, ids)
        return self.group.sum(delta if self.shared is None else delta + self._shared(x, share))

    def serve_others(self) -> None:
        """Run the experts of this engine for the other engines' tokens of this round."""
        assert self.rounds is not None
        weight = self.router.weight
        # An empty batch of hidden states; the router's weight has the activations' dtype.
        x = torch.empty(0, weight.shape[1], dtype=weight.dtype, device=weight.device)
        weights = x.new_empty(0, self.spec.active, dtype=torch.float32)
        ids, slots = weights.int(), x.new_empty(0, dtype=torch.int64)
        self._in_round(self.rounds, x, weights, ids, slots)

    def _in_round(
        self, rounds: Rounds, x: Tensor, weights: Tensor, ids: Tensor, slots: Tensor
    ) -> Tensor:
        """The routed experts' output for x, of which other engines compute a part."""
        assert self.places is not None
        every, weighed = rounds.gathered(x), rounds.gathered(weights)
        chosen = self.places.own(rounds.gathered(ids, -1), rounds.gathered(slots))
        return rounds.own(self._experts(every, weighed, chosen), len(x))

    def _experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen = Chosen(weights, ids, self.spec.limit)
        return self.gate_up.scheme.experts(self.gate_up, self.down, x, chosen)

    def _shared(self, x: Tensor, share: Tensor | None) -> Tensor:
        """The shared expert's MLP, times the gate's share [T, 1] if there is one."""
        assert self.shared is not None
        delta = self.shared(Hidden(x))
        y: Tensor = delta.value() if isinstance(delta, Product) else delta
        return y if share is None else (y * share).to(y.dtype)


def _joined(spec: MoeFfn, group: Group, routed: Scheme, shared: Scheme) -> int:
    """As how many experts of the grouped GEMMs the shared expert is stored; 0: it is a separate
    MLP."""
    if spec.shared % spec.intermediate or (spec.placement and not spec.shared_places):
        return 0
    count = spec.shared // spec.intermediate
    # Decided by the width of undivided experts, so that all ranks decide the same.
    width = spec.intermediate * group.size if count > 1 else 0
    if spec.placement:
        width = spec.intermediate
    return count if routed.joins(shared, width) else 0
