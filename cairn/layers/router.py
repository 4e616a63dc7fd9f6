"""The router of a mixture of experts: how experts are scored, and which a token runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.weight import Source, Weight
from cairn.specs.ffn import RouterSpec


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
