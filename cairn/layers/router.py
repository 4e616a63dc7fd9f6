"""The router of a mixture of experts: how experts are scored, and which a token runs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.errors import BadModel
from cairn.layers.weight import Source, Weight
from cairn.specs.ffn import RouterSpec


class Router(nn.Module):
    """Scores of all experts in float32, and the choice of the best.

    Args:
        spec: how tokens choose.
        hidden: width of x.
        experts: number of experts, E.
        active: experts of a token.
        dtype: of the matrix.
    """

    def __init__(
        self, spec: RouterSpec, hidden: int, experts: int, active: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec, self.active = spec, active
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype), requires_grad=False)
        self.bias: nn.Parameter | None = None
        self.table: nn.Parameter | None = None
        if spec.table_rows:
            table = torch.empty(spec.table_rows, active, dtype=torch.int32)
            self.table = nn.Parameter(table, requires_grad=False)
        if spec.bias:
            bias = torch.empty(experts, dtype=torch.float32)
            self.bias = nn.Parameter(bias, requires_grad=False)

    def weights(self, source: Source) -> list[Weight]:
        """gate.weight, and the correction or gate.tid2eid."""
        shape = tuple(self.weight.shape)
        found = [Weight(source.name("gate.weight"), shape, self.weight)]
        if self.bias is not None:
            name = source.name(self.spec.bias_name)
            found.append(Weight(name, shape[:1], self.bias, draw="around_zero"))
        if self.table is not None:
            found.append(
                Weight(
                    source.name("gate.tid2eid"),
                    tuple(self.table.shape),
                    self.table,
                    transform=functools.partial(checked_experts, experts=shape[0]),
                    draw="experts",
                    dtypes=("I64", "I32"),
                    choices=shape[0],
                )
            )
        return found

    def forward(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, hidden] and ids [T] int64 of the tokens, None: unknown -> weights [T, active]
        float32 and experts [T, active] int32."""
        spec, active = self.spec, self.active
        scores = ops.linear(x, self.weight, dtype=torch.float32)
        if self.table is not None:
            assert ids is not None, "a router with a table reads token ids"
            return ops.hash_topk(scores, self.table, ids, spec.scale)
        if spec.score == "sqrtsoftplus":
            bias = scores.new_zeros(scores.shape[1]) if self.bias is None else self.bias
            groups, rule = (spec.groups, spec.top_groups), (0, spec.scale, True)
            return ops.moe_fused_gate(
                *(scores, bias, *groups, active, *rule),
                scoring_func=spec.score,
                renormalize=spec.renormalize,
            )
        if spec.score == "sigmoid":
            bias = scores.new_zeros(scores.shape[1]) if self.bias is None else self.bias
            groups = spec.groups, spec.top_groups
            return ops.grouped_topk(scores, bias, *groups, active, spec.renormalize, spec.scale)
        weights = scores.new_empty(len(scores), active)
        chosen = torch.empty(len(scores), active, dtype=torch.int32, device=scores.device)
        ops.topk_softmax(weights, chosen, scores, spec.renormalize)
        return weights * spec.scale if spec.scale != 1.0 else weights, chosen


def checked_experts(table: Tensor, experts: int) -> Tensor:
    """A table of experts.

    Raises:
        BadModel: it holds a number that is no expert's.
    """
    low, high = (int(n) for n in table.aminmax())
    if low < 0 or high >= experts:
        raise BadModel(
            f"a table of experts (gate.tid2eid) holds {low if low < 0 else high}, but there are "
            f"{experts} experts",
            "Copy the file again",
        )
    return table
