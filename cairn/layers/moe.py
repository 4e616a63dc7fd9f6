"""Mixture of experts: a router, the experts that it chooses, and one that every token runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.linear import PLAIN, ExpertLinear
from cairn.layers.mlp import GatedMLP
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.ffn import MoeFfn, RouterSpec


class Router(nn.Module):
    """Scores of all experts in float32, and the choice of the best.

    Args:
        spec: how tokens choose.
        hidden: width of x.
        experts: number of experts, E.
        dtype: of the matrix.
    """

    def __init__(self, spec: RouterSpec, hidden: int, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if spec.bias:
            bias = torch.empty(experts, dtype=torch.float32)
            self.bias = nn.Parameter(bias, requires_grad=False)

    def weights(self, source: Source) -> list[Weight]:
        """gate.weight, and gate.e_score_correction_bias."""
        shape = tuple(self.weight.shape)
        found = [Weight(source.name("gate.weight"), shape, self.weight)]
        if self.bias is not None:
            name = source.name("gate.e_score_correction_bias")
            found.append(Weight(name, shape[:1], self.bias, draw="around_zero"))
        return found

    def forward(self, x: Tensor, active: int) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> weights [T, active] float32 and experts [T, active] int32."""
        spec, scores = self.spec, ops.linear(x, self.weight, dtype=torch.float32)
        if spec.score == "sigmoid":
            bias = scores.new_zeros(scores.shape[1]) if self.bias is None else self.bias
            groups = spec.groups, spec.top_groups
            return ops.grouped_topk(scores, bias, *groups, active, spec.renormalize, spec.scale)
        weights = scores.new_empty(len(scores), active)
        chosen = torch.empty(len(scores), active, dtype=torch.int32, device=scores.device)
        ops.topk_softmax(weights, chosen, scores, spec.renormalize)
        return weights * spec.scale if spec.scale != 1.0 else weights, chosen


class MixtureOfExperts(nn.Module):
    """Sum over the chosen experts of weight * down(silu(gate x) * up x), and the shared expert.

    Args:
        spec: experts, router and shared expert.
        hidden: width of x.
        dtype: of activations.
        scheme: how the experts' matrices are kept.
    """

    def __init__(
        self, spec: MoeFfn, hidden: int, *, dtype: torch.dtype, scheme: Scheme = PLAIN
    ) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec.router, hidden, spec.experts, dtype)
        up = [Rows("gate_proj", spec.intermediate), Rows("up_proj", spec.intermediate)]
        self.gate_up = ExpertLinear(
            spec.experts, hidden, up, "gate_up_proj", dtype=dtype, scheme=scheme
        )
        down = [Rows("down_proj", hidden)]
        self.down = ExpertLinear(
            spec.experts, spec.intermediate, down, "down_proj", dtype=dtype, scheme=scheme
        )
        self.shared: GatedMLP | None = None
        self.shared_gate: nn.Parameter | None = None
        if spec.shared:
            self.shared = GatedMLP(hidden, spec.shared, dtype=dtype, scheme=scheme)
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
        weights, chosen = self.router(x, self.spec.active)
        up, down = self.gate_up, self.down
        if up.scheme.converts:
            # Matrices of experts that nobody chose are not converted.
            hit, chosen = chosen.long().unique(return_inverse=True)
            matrices = up.matrices(hit, x.dtype), down.matrices(hit, x.dtype)
        else:
            matrices = up.weight, down.weight
        delta: Tensor = ops.fused_experts(x, *matrices, weights, chosen)
        return delta if self.shared is None else delta + self._shared(x)

    def _shared(self, x: Tensor) -> Tensor:
        """The shared expert, gated if it has a gate."""
        assert self.shared is not None
        delta = self.shared(Hidden(x))
        y: Tensor = delta.value() if isinstance(delta, Product) else delta
        if self.shared_gate is None:
            return y
        return y * ops.linear(x, self.shared_gate).sigmoid()
