"""Gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn

from cairn.distributed.groups import ALONE, Group
from cairn.layers.linear import PLAIN, GatedLinear, Linear
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.ffn import DenseFfn


class GatedMLP(nn.Module):
    """down(activation(W_gate x) * W_up x), with gate and up in one matrix.

    Args:
        hidden: width of x.
        spec: intermediate width, and the activation.
        dtype: of activations.
        scheme: storage of the weight matrices.
        group: tensor-parallel ranks, which divide the intermediate width; `spec` has one rank's
            share.
    """

    def __init__(
        self,
        hidden: int,
        spec: DenseFfn,
        *,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.gate_up = GatedLinear(
            hidden,
            spec.intermediate,
            (spec.names.gate, spec.names.up),
            activation=spec.activation,
            limit=spec.limit,
            dtype=dtype,
            scheme=scheme,
        )
        down = [Rows(spec.names.down, hidden)]
        self.down = Linear(spec.intermediate, down, dtype=dtype, scheme=scheme, group=group)

    def weights(self, source: Source) -> list[Weight]:
        """The three matrices."""
        return self.gate_up.weights(source) + self.down.weights(source)

    def forward(self, h: Hidden) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        return Product(self.down, self.gate_up(h.x, h.norm))
