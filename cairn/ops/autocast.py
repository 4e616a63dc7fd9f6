"""Ops run with torch.autocast disabled.

Under autocast a definition in float32 would multiply in bfloat16, which is another formula.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to run with autocast disabled; return it as it is where no autocast is
    enabled."""
    if not torch._C._is_any_autocast_enabled():
        return function

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return call
