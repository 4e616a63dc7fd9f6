"""Linear maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.embedding import Table
from cairn.layers.norm import RMSNorm
from cairn.ops.linear import skinny_gemm_panel


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
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [..., in], normed first if there is a norm, -> [..., out], in x's dtype."""
        if norm is None:
            return ops.linear(x, self.weight, self.bias)
        return ops.linear(x, self.weight, self.bias, norm.weight, norm.eps)

    def add_to(self, residual: Tensor, x: Tensor, norm: RMSNorm | None = None) -> Tensor | None:
        """residual [T, out] += what `forward` gives for x [T, in], in place.

        Args:
            norm: what residual goes through next.
        Returns:
            [T, out], residual after the norm; None: whoever reads it does the norm better.
        """
        if norm is None or not skinny_gemm_panel.sums_in_norm(x, self.weight, self.bias):
            ops.linear_add(x, residual, self.weight, self.bias)
            return None
        return ops.linear_add_rmsnorm(x, residual, self.weight, norm.weight, self.bias, norm.eps)


class GatedLinear(Linear):
    """y = silu(A x) * B x, where `weight` [2 out, in] is A, then B.

    Args:
        in_features, out_features: widths.
        dtype: of the parameters.
    """

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype) -> None:
        super().__init__(in_features, 2 * out_features, dtype=dtype)

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [T, in], normed first if there is a norm, -> [T, out], in x's dtype."""
        given = () if norm is None else (norm.weight, norm.eps)
        return ops.gated_linear(x, self.weight, *given)


class Head(Table):
    """The output head, a table of the V tokens of users: logits = x W[:V]^T."""

    def logits(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [n, hidden] before the final norm -> float32 logits [n, V], a part of longer rows."""
        return _logits(x, self.weight, norm, len(self.weight) - self.padding)


class TiedHead(nn.Module):
    """The embedding matrix as output head.

    Args:
        embedding: the module whose `weight` [rows, hidden] is shared.
        vocab_size: V; rows from V on are no tokens of users and get no logit.
    """

    def __init__(self, embedding: Table, vocab_size: int) -> None:
        super().__init__()
        # In a tuple: a plain attribute would register the embedding's parameter a second time.
        self._embedding = (embedding,)
        self.vocab_size = vocab_size

    def logits(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """As of a head of its own."""
        return _logits(x, self._embedding[0].weight, norm, self.vocab_size)


def _logits(x: Tensor, weight: Tensor, norm: RMSNorm, vocab_size: int) -> Tensor:
    every: Tensor = ops.linear(x, weight, None, norm.weight, norm.eps, torch.float32)
    return every[:, :vocab_size]
