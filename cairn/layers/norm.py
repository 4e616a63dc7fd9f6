"""Norms of activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.distributed.groups import Group
from cairn.layers.weight import Source, Weight
from cairn.ops import planning


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, statistics in float32.

    Args:
        width: size of the last dimension.
        eps: added to the mean square.
        dtype: of the weight.
        unit_offset: the checkpoint stores w - 1. w is stored in float32: a shorter dtype would
            round it near 1.
    """

    def __init__(
        self, width: int, eps: float, *, dtype: torch.dtype, unit_offset: bool = False
    ) -> None:
        super().__init__()
        kept = torch.float32 if unit_offset else dtype
        self.weight = nn.Parameter(torch.empty(width, dtype=kept), requires_grad=False)
        self.eps = eps
        self.unit_offset = unit_offset

    def weights(self, source: Source, name: str) -> list[Weight]:
        """The vector `name`.weight."""
        return [
            Weight(
                source.name(f"{name}.weight"),
                (self.weight.shape[0],),
                self.weight,
                transform=_plus_one if self.unit_offset else None,
                draw="around_one",
            )
        ]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype; x may be a strided view."""
        return ops.rmsnorm(x, self.weight, self.eps)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [..., width] += what `forward` gives for x, in place."""
        ops.rmsnorm_add(x, residual, self.weight, self.eps)

    def of_sum(self, residual: Tensor, delta: Tensor) -> Tensor | None:
        """residual [T, width] += delta, in place; returns the norm of the sum, for which delta's
        memory is used. None: the norm is left to the next product, which fuses it on this
        device."""
        if not planning.fuses_add_norm(delta):
            residual += delta
            return None
        ops.fused_add_rmsnorm(delta, residual, self.weight, self.eps)
        return delta


class DividedNorm(RMSNorm):
    """RMSNorm of a vector of which each rank has a part of `width` elements.

    Args:
        width, eps, dtype, unit_offset: of `RMSNorm`.
        group: the ranks.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        dtype: torch.dtype,
        unit_offset: bool = False,
        group: Group,
    ) -> None:
        super().__init__(width, eps, dtype=dtype, unit_offset=unit_offset)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width], a rank's part -> the same shape and dtype."""
        wide = x.float()
        squares = self.group.sum(wide.square().sum(-1, keepdim=True))
        scale = (squares / (self.group.size * x.shape[-1]) + self.eps).rsqrt()
        return (wide * scale * self.weight.float()).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * w + b over the last dimension, in float32.

    Args:
        width: size of the last dimension.
        eps: added to the variance.
        dtype: of weight and bias.
    """

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        self.eps = eps

    def weights(self, source: Source, name: str) -> list[Weight]:
        """The vectors `name`.weight and `name`.bias."""
        shape = (self.weight.shape[0],)
        return [
            Weight(source.name(f"{name}.weight"), shape, self.weight, draw="around_one"),
            Weight(source.name(f"{name}.bias"), shape, self.bias, draw="around_zero"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return ops.layernorm(x, self.weight, self.bias, self.eps)


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1.0
