"""Linear maps, with their weights packed for the CPU's matrix kernels after loading."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.norm import RMSNorm
from cairn.ops.linear import panel
from cairn.ops.linear.packed import pack_weight, packed_linear
from cairn.ops.linear.packed_gated_linear import packed_gated_linear


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
        self._multiply: Callable[..., Tensor] = packed_linear

    def pack(self) -> None:
        """Keep the weight in the layout of this CPU's kernels and drop the plain copy.

        Does nothing where there is no such layout. Call it once, after loading.
        """
        if self.weight is None or self.weight.device.type != "cpu":
            return
        packed = pack_weight(self.weight)
        if packed is not None:
            # All calls are of one kind: what they run is chosen once.
            self._multiply = packed_linear.using(packed_linear.choice(self.weight[:1], packed))
            self._packed, self.weight = packed, None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [..., in], normed first if there is a norm, -> [..., out], in x's dtype."""
        if self.weight is None:
            return self._of_packed(x, norm)
        if norm is None:
            return ops.linear(x, self.weight, self.bias)
        return ops.linear(x, self.weight, self.bias, norm.weight, norm.eps)

    def logits(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [n, in] before the final norm -> float32 logits [n, out]."""
        if self.weight is None:
            return self._of_packed(x, norm).float()
        return ops.linear(x, self.weight, self.bias, norm.weight, norm.eps, torch.float32)

    def add_to(self, residual: Tensor, x: Tensor, norm: RMSNorm | None = None) -> Tensor | None:
        """residual [T, out] += what `forward` gives for x [T, in], in place.

        Args:
            norm: what residual goes through next.
        Returns:
            [T, out], residual after the norm; None: whoever reads it does the norm better.
        """
        if self.weight is None:
            residual += self._of_packed(x, None)
            return None
        if norm is None or not panel.sums_in_norm(x, self.weight):
            ops.linear_add(x, residual, self.weight, self.bias)
            return None
        return ops.linear_add_rmsnorm(x, residual, self.weight, norm.weight, self.bias, norm.eps)

    def _of_packed(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        assert self._packed is not None
        if norm is None:
            return self._multiply(x, self._packed, self.bias)
        return self._multiply(x, self._packed, self.bias, norm.weight, norm.eps)


class GatedLinear(Linear):
    """y = silu(A x) * B x, where `weight` [2 out, in] is A, then B.

    Args:
        in_features, out_features: widths.
        dtype: of the parameters.
    """

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype) -> None:
        super().__init__(in_features, 2 * out_features, dtype=dtype)
        self._halves: tuple[Tensor, Tensor] | None = None
        self._gate: Callable[..., Tensor] = packed_gated_linear

    def pack(self) -> None:
        """As of a Linear, of both matrices."""
        if self.weight is None or self.weight.device.type != "cpu":
            return
        gate, up = (pack_weight(half) for half in self.weight.chunk(2))
        if gate is not None and up is not None:
            chosen = packed_gated_linear.choice(self.weight[:1], gate, up)
            self._gate = packed_gated_linear.using(chosen)
            self._halves, self.weight = (gate, up), None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [T, in], normed first if there is a norm, -> [T, out], in x's dtype."""
        given = () if norm is None else (norm.weight, norm.eps)
        if self._halves is not None:
            return self._gate(x, *self._halves, *given)
        assert self.weight is not None
        return ops.gated_linear(x, self.weight, *given)


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

    def logits(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [n, hidden] before the final norm -> float32 logits [n, V]."""
        if self._packed is not None:
            return packed_linear(x, self._packed, None, norm.weight, norm.eps).float()
        return ops.linear(x, self._weight(), None, norm.weight, norm.eps, torch.float32)

    def _weight(self) -> Tensor:
        weight = self._embedding[0].weight
        assert isinstance(weight, Tensor)
        return weight[: self.vocab_size]
