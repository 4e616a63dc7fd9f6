"""The router of a mixture of experts: scores of experts, and the choice of each token's experts."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.errors import BadModel
from cairn.layers.weight import Source, Weight
from cairn.specs.ffn import MoeFfn


class Router(nn.Module):
    """Scores of all experts in float32, and the choice of the best.

    Args:
        spec: of the mixture.
        hidden: width of x.
        dtype: of the matrix.
        shared: experts E, E + 1, .. that every token runs, with the weight 1, or sigmoid of the
            shared expert's gate.

    Attributes:
        weight: [E, hidden], or [E + 1, hidden] with the gate as its last row.
    """

    def __init__(self, spec: MoeFfn, hidden: int, dtype: torch.dtype, shared: int) -> None:
        super().__init__()
        self.spec, self.experts, self.active = spec.router, spec.experts, spec.active
        self.shared, self.gated = shared, spec.shared_gate
        matrix = torch.empty(spec.experts + spec.shared_gate, hidden, dtype=dtype)
        self.weight = nn.Parameter(matrix, requires_grad=False)
        self.bias: nn.Parameter | None = None
        self.table: nn.Parameter | None = None
        if self.spec.table_rows:
            table = torch.empty(self.spec.table_rows, spec.active, dtype=torch.int32)
            self.table = nn.Parameter(table, requires_grad=False)
        if self.spec.bias:
            bias = torch.empty(spec.experts, dtype=torch.float32)
            self.bias = nn.Parameter(bias, requires_grad=False)

    def weights(self, source: Source) -> list[Weight]:
        """gate.weight, and the correction or gate.tid2eid."""
        count, hidden = self.experts, self.weight.shape[1]
        name = source.name("gate.weight")
        found = [Weight(name, (count, hidden), self.weight, slice(0, count))]
        if self.bias is not None:
            name = source.name(self.spec.bias_name)
            found.append(Weight(name, (count,), self.bias, draw="around_zero"))
        if self.table is not None:
            found.append(
                Weight(
                    source.name("gate.tid2eid"),
                    tuple(self.table.shape),
                    self.table,
                    transform=functools.partial(checked_experts, experts=count),
                    draw="experts",
                    dtypes=("I64", "I32"),
                    choices=count,
                )
            )
        return found

    def shared_gate_weights(self, source: Source, shared_name: str) -> list[Weight]:
        """The gate of the shared expert, if it has one."""
        if not self.gated:
            return []
        name, shape = source.name(f"{shared_name}_gate.weight"), (1, self.weight.shape[1])
        return [Weight(name, shape, self.weight, slice(self.experts, self.experts + 1))]

    def forward(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, hidden] and ids [T] int64 of the tokens, None: unknown -> weights
        [T, active + shared] float32 and experts [T, active + shared] int32."""
        spec, active, shared = self.spec, self.active, self.shared
        scores, gate = ops.linear(x, self.weight, dtype=torch.float32), None
        if self.gated:
            scores, gate = scores.tensor_split([self.experts], dim=1)
        if self.table is not None:
            assert ids is not None, "a router with a table reads token ids"
            given = (scores, self.table, ids, spec.scale)
            return ops.hash_topk(*given, shared=shared, shared_gate=gate)
        if spec.score == "softmax":
            weights = scores.new_empty(len(scores), active + shared)
            chosen = torch.empty_like(weights, dtype=torch.int32)
            rule = spec.renormalize
            ops.topk_softmax(weights, chosen, scores, rule, shared=shared, shared_gate=gate)
            if spec.scale != 1.0:
                weights[:, :active] *= spec.scale
            return weights, chosen
        bias = scores.new_zeros(self.experts) if self.bias is None else self.bias
        return ops.grouped_topk(
            *(scores, bias, spec.groups, spec.top_groups, active, spec.renormalize, spec.scale),
            scoring_func=spec.score,
            shared=shared,
            shared_gate=gate,
        )


def checked_experts(table: Tensor, experts: int) -> Tensor:
    """A table of experts.

    Raises:
        BadModel: it contains an index that is not an expert's.
    """
    low, high = (int(n) for n in table.aminmax())
    if low < 0 or high >= experts:
        raise BadModel(
            f"a table of experts (gate.tid2eid) holds {low if low < 0 else high}, but there are "
            f"{experts} experts",
            "Copy the file again",
        )
    return table
