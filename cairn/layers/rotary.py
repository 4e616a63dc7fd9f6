"""Rotary position embedding: frequencies, and cos, sin of a step's positions.

Angles are position * frequency, both factors and the product float32: at position 500,000 another
precision changes results. No table over positions, so the context length is not limited.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn import ops
from cairn.specs.rotary import LinearScaling, Llama3Scaling, RotarySpec, YarnSpec


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


def yarn_frequencies(head_dim: int, theta: float, yarn: YarnSpec) -> Tensor:
    """Standard frequencies, blended with those divided by the factor: [d/2] float32 on the CPU.

    Peng et al. 2023, section 3.2: pairs that turn more than `beta_fast` times in the original
    context stay, those that turn less than `beta_slow` times are divided, with a ramp in between.
    """
    frequencies = standard_frequencies(head_dim, theta)

    def pair(turns: float) -> float:
        return head_dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def llama3_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling) -> Tensor:
    """Standard frequencies, those of slow pairs divided by the factor: [d/2] float32 on the CPU."""
    frequencies = standard_frequencies(head_dim, theta)
    turns = scaling.original * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


class Rotary:
    """The rotation of a RotarySpec, shared by all layers that have it.

    Attributes:
        spec: what it was made from.
        dim: d, rotated dimensions.
    """

    def __init__(self, spec: RotarySpec) -> None:
        self.spec = spec
        self.dim = spec.head_dim
        # On the CPU whatever the default device is: a power on another device rounds differently.
        with torch.device("cpu"):
            self._origin = _frequencies(spec)
            self._axes = torch.tensor(2 * spec.axes())
        self._by_device = {self._origin.device: (self._origin, self._axes)}

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """[cos | sin] of positions [T], or on several axes [axes, T]: [T, d] float32 (rounded
        through `dtype` if so trained)."""
        device = positions.device
        if device not in self._by_device:
            self._by_device[device] = self._origin.to(device), self._axes.to(device)
        frequencies, axes = self._by_device[device]
        table: Tensor = ops.rotary_cos_sin(positions.reshape(-1), frequencies)
        if positions.dim() == 2:
            by_axis = table.view(*positions.shape, -1)
            table = by_axis.gather(0, axes.expand(1, *by_axis.shape[1:]))[0]
        if self.spec.attention_factor != 1.0:
            table = table * self.spec.attention_factor
        return table.to(dtype).float() if self.spec.rounded else table

    def rotate(self, index: Tensor, query: Tensor, key: Tensor | None, cos_sin: Tensor) -> None:
        """Rotate the first d dimensions of query [n, h, D] and key [n, h_kv, D] in place, by row
        index[i] of cos_sin [T, d]."""
        neox = not self.spec.interleaved
        ops.rotary_embedding(index, query, key, query.shape[-1], cos_sin, neox)


def _frequencies(spec: RotarySpec) -> Tensor:
    if spec.kind == "in_range":
        return in_range_frequencies(
            spec.head_dim, spec.theta, spec.context_length, spec.period_multiplier
        )
    if spec.kind == "hope":
        return hope_frequencies(spec.head_dim, spec.theta, spec.pairs)
    if isinstance(spec.scaling, YarnSpec):
        return yarn_frequencies(spec.head_dim, spec.theta, spec.scaling)
    if isinstance(spec.scaling, Llama3Scaling):
        return llama3_frequencies(spec.head_dim, spec.theta, spec.scaling)
    frequencies = standard_frequencies(spec.head_dim, spec.theta)
    return (
        frequencies / spec.scaling.factor
        if isinstance(spec.scaling, LinearScaling)
        else frequencies
    )


class Angles:
    """[cos | sin] of a step's positions, computed once for all layers that rotate alike.

    Args:
        positions: [T] int64, or on several axes [axes, T].
        dtype: of the activations.
    """

    def __init__(self, positions: Tensor, dtype: torch.dtype) -> None:
        self._positions, self._dtype = positions, dtype
        self._tables: dict[tuple[Rotary, int], Tensor] = {}
        self._index: Tensor | None = None

    def of(self, rotary: Rotary, back: int = 0) -> Tensor:
        """[T, d] float32; for the positions minus `back`, at least 0."""
        key = rotary, back
        found = self._tables.get(key)
        if found is None:
            positions = (self._positions - back).clamp(min=0) if back else self._positions
            found = self._tables[key] = rotary.cos_sin(positions, self._dtype)
        return found

    @property
    def index(self) -> Tensor:
        """[T] int64: 0, 1, 2, ..."""
        if self._index is None:
            count, device = self._positions.shape[-1], self._positions.device
            self._index = torch.arange(count, dtype=torch.int64, device=device)
        return self._index
