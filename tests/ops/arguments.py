"""Tensors among the arguments and results of calls of ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cairn.ops.testing import Arguments


def tensors_of(arguments: Arguments) -> list[Tensor]:
    values = (*arguments.args, *arguments.kwargs.values())
    return [value for value in values if isinstance(value, Tensor)]


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else tuple(result)
