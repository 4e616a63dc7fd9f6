"""The residual stream of a step: the one place where it is summed and normed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cairn.layers.linear import Linear
from cairn.layers.norm import RMSNorm


class Hidden(NamedTuple):
    """Input of a mixer or feed-forward part: the residual stream and the norm to apply.

    Attributes:
        x: [T, hidden].
        norm: what x still has to go through: a product may fuse it. None: nothing.
    """

    x: Tensor
    norm: RMSNorm | None = None

    def value(self) -> Tensor:
        """x after the norm, [T, hidden]."""
        return self.x if self.norm is None else self.norm(self.x)


class Product(NamedTuple):
    """Output of a mixer or feed-forward part before its last matrix product, so that the product
    and the residual add can be fused.

    Attributes:
        linear: the last map of a mixer or a feed-forward part.
        x: [T, in], what it is applied to.
    """

    linear: Linear
    x: Tensor

    def value(self) -> Tensor:
        """The delta, [T, hidden]."""
        product: Tensor = self.linear(self.x)
        return product


Delta = Tensor | Product


class Residual:
    """The residual stream.

    Args:
        x: [T, hidden], the embedded tokens; changed in place.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._normed: tuple[RMSNorm, Tensor] | None = None

    def read(self, norm: RMSNorm | None) -> Hidden:
        """The stream for a reader that norms it first, or takes it as it is."""
        if norm is not None and self._normed is not None and self._normed[0] is norm:
            return Hidden(self._normed[1])
        return Hidden(self.x, norm)

    def add(
        self,
        delta: Delta,
        next_norm: RMSNorm | None = None,
        own_norm: RMSNorm | None = None,
    ) -> None:
        """x += delta.

        Args:
            delta: what a mixer or a feed-forward part returned.
            next_norm: the norm of the next reader, which may be computed on the way.
            own_norm: the delta goes through this norm first.
        """
        self._normed = None
        if own_norm is not None:
            own_norm.add_to(self.x, delta.value() if isinstance(delta, Product) else delta)
        elif isinstance(delta, Product):
            normed = delta.linear.add_to(self.x, delta.x, next_norm)
            if next_norm is not None and normed is not None:
                self._normed = next_norm, normed
        else:
            self.x += delta
