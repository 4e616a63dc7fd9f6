"""Gated delta net: a recurrent state in the place of a cache (Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.specs.backends import GATED_DELTA


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """One recurrent layer.

    Attributes:
        key_heads, value_heads: hk and hv; value head j reads key head j // (hv / hk).
        key_dim, value_dim: dk and dv.
        conv_kernel: W, inputs that the depthwise convolution sees.
        eps: of the gated output norm.
        grouped: a checkpoint's projections are [q | k | v | z] and [b | a] by key head.
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

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def selects(self) -> bool:
        """It reads its state, no pages."""
        return False

    @property
    def description(self) -> str:
        """In words, for `cairn inspect`."""
        return (
            f"gated delta net: {self.value_heads} states of {self.key_dim} x {self.value_dim}, "
            f"convolution of {self.conv_kernel}"
        )
