"""Rotary position embedding: frequencies, and cos, sin of a step's positions.

Pairs are (c, c + d/2). Angles are position * frequency, both factors and the product float32: at
position 500,000 another precision is visible. Nothing is tabulated over positions, so no context
is too long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn import ops


def standard_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2c/d) for every pair c: [d/2] float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def in_range_frequencies(
    head_dim: int, theta: float, context_length: int, period_multiplier: float
) -> Tensor:
    """Standard frequencies, 0 where a pair turns too slowly: [d/2] float32 on the CPU.

    Kept are pair 0 and those that turn at least `period_multiplier` times in the context.
    """
    frequencies = standard_frequencies(head_dim, theta)
    kept = frequencies >= 2 * math.pi * period_multiplier / context_length
    kept[0] = True
    return frequencies * kept


def hope_frequencies(head_dim: int, theta: float, pairs: int) -> Tensor:
    """theta^(-c/pairs) for the first `pairs` pairs, 0 for the others: [d/2] float32 on the CPU."""
    frequencies = torch.zeros(head_dim // 2)
    exponents = torch.arange(pairs, dtype=torch.float32) / pairs
    frequencies[:pairs] = 1.0 / (theta**exponents)
    return frequencies


class Rotary:
    """One set of frequencies, shared by all layers that rotate alike.

    Args:
        frequencies: [d/2] float32.
        rounded: cos and sin are rounded to the model's dtype before use.
    """

    def __init__(self, frequencies: Tensor, rounded: bool) -> None:
        self._frequencies = {frequencies.device: frequencies}
        self._origin = frequencies
        self.rounded = rounded

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[cos | sin] of positions [T]: [T, d] float32 (rounded through `dtype` if so trained)."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._origin.to(device)
        table = ops.rotary_cos_sin(positions, self._frequencies[device])
        return table.to(dtype).float() if self.rounded else table


def rotate(index: Tensor, query: Tensor, key: Tensor | None, cos_sin: Tensor) -> None:
    """Rotate query [n, h, d] and key [n, h_kv, d] in place by row index[i] of cos_sin [T, d]."""
    ops.rotary_embedding(index, query, key, query.shape[-1], cos_sin)
