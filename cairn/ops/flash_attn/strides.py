"""How tensors of heads are addressed."""

from __future__ import annotations

from torch import Tensor


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Of sequence (or page), token and head; ragged tensors lie as one sequence."""
    if x is None:
        return (0, 0, 0)
    return tuple(x.stride()[:3]) if x.dim() == 4 else (0, *x.stride()[:2])
