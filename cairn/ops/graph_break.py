"""Calls that torch.compile cannot trace, such as those of functions on raw addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def with_graph_break(function: Callable[..., T], *args: object) -> T:
    """Return function(*args); under torch.compile the graph breaks at this call."""
    if not torch.compiler.is_compiling():
        return function(*args)
    # torch.compiler.disable imports torch._dynamo, which takes as long as the rest of cairn.ops.
    run: Callable[..., T] = torch.compiler.disable(function)
    return run(*args)
