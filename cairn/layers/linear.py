"""Linear maps, with their weights packed for the CPU's matrix kernels after loading."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn.ops.linear.packed import pack_weight, packed_linear


class Linear(nn.Module):
    """y = x W^T + b, for inference.

    Args:
        in_features, out_features: widths.
        bias: whether there is a b [out].
        dtype: of the parameters.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=dtype)
        self.weight: nn.Parameter | None = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Keep the weight in the layout of this CPU's kernels and drop the plain copy.

        Does nothing where there is no such layout. Call it once, after loading.
        """
        if self.weight is None or self.weight.device.type != "cpu":
            return
        packed = pack_weight(self.weight)
        if packed is not None:
            self._packed, self.weight = packed, None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        if self.weight is not None:
            return nn.functional.linear(x, self.weight, self.bias)
        assert self._packed is not None
        return packed_linear(x, self._packed, self.bias)


class TiedHead(nn.Module):
    """The embedding matrix as output head: logits = x E[:V]^T.

    Args:
        embedding: the module whose `weight` [rows, hidden] is shared.
        vocab_size: V; rows from V on are no tokens of users and get no logit.
    """

    def __init__(self, embedding: nn.Module, vocab_size: int) -> None:
        super().__init__()
        # In a tuple: a plain attribute would register the embedding's parameter a second time.
        self._embedding = (embedding,)
        self.vocab_size = vocab_size
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Keep a copy in the layout of this CPU's kernels; ids still index the table itself."""
        weight = self._weight()
        if weight.device.type == "cpu":
            self._packed = pack_weight(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> logits [n, V], in x's dtype."""
        if self._packed is not None:
            return packed_linear(x, self._packed)
        return nn.functional.linear(x, self._weight())

    def _weight(self) -> Tensor:
        weight = self._embedding[0].weight
        assert isinstance(weight, Tensor)
        return weight[: self.vocab_size]
