"""Gated delta net: a recurrent state instead of a KV cache (Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from cairn.specs.backends import GATED_DELTA
from cairn.specs.shares import share


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """One recurrent layer.

    Attributes:
        key_heads, value_heads: hk and hv; value head j reads key head j // (hv / hk).
        key_dim, value_dim: dk and dv.
        conv_kernel: W, taps of the depthwise convolution.
        eps: of the gated output norm.
        grouped: the checkpoint stores projections as [q | k | v | z] and [b | a] by key head.
        backend: name of the backend.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float
    grouped: bool = False
    backend: str = GATED_DELTA

    def of_rank(self, ranks: int) -> Self:
        """The heads of one of several ranks. Raises BadConfig if they cannot be divided."""
        keys = share(self.key_heads, ranks, "key heads of recurrent layers")
        return replace(self, key_heads=keys, value_heads=self.value_heads // ranks)

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of the convolution: those of q, of k and of v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """The sum of `conv_parts`."""
        return sum(self.conv_parts)

    @property
    def selects(self) -> bool:
        """False: it has a state and reads no pages."""
        return False

    @property
    def description(self) -> str:
        """Description for `cairn inspect`."""
        return (
            f"gated delta net: {self.value_heads} states of {self.key_dim} x {self.value_dim}, "
            f"convolution of {self.conv_kernel}"
        )
