"""How tensors of heads are addressed."""

from __future__ import annotations

from torch import Tensor


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Of sequence (or page), token and head; ragged tensors lie as one sequence."""
    if x is None:
        return (0, 0, 0)
    return tuple(x.stride()[:3]) if x.dim() == 4 else (0, *x.stride()[:2])


def named_strides(name: str, x: Tensor | None, *parts: str) -> dict[str, int]:
    """`strides` of a tensor as a kernel's arguments, one for each part: NAME_PART."""
    return {f"{name}_{part}": step for part, step in zip(parts, strides(x), strict=True)}
