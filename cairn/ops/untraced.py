"""Calls of functions on raw addresses, which torch.compile cannot trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def untraced(function: Callable[..., T], *args: object) -> T:
    """function(*args). Under torch.compile the graph breaks here."""
    if not torch.compiler.is_compiling():
        return function(*args)
    # It imports torch's tracer, which takes as long as the rest of cairn.ops: not before a trace.
    run: Callable[..., T] = torch.compiler.disable(function)
    return run(*args)
