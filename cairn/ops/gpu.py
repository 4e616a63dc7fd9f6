"""Triton, where it is installed. Kernel files import `triton` and `tl` from here.

Without Triton the definitions serve alone: kernels are then plain functions that nobody calls, and
`DEVICES`, which every Triton implementation registers for, is empty. With TRITON_INTERPRET=1 the
kernels run on CPU tensors, in float32; the generic op test does that where there is no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch


class _NoTriton:
    """Stands for the module: decorators give the function back."""

    @staticmethod
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """What `triton.jit` is written as, without effect."""
        return function if function is not None else lambda kernel: kernel


triton: Any = _NoTriton()
tl: Any = None
with contextlib.suppress(ImportError):
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")

AVAILABLE = tl is not None
DEVICES: tuple[str, ...] = ("cuda",) if AVAILABLE else ()
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"


def next_power_of_2(number: int) -> int:
    """Smallest power of two >= number, for number >= 1."""
    return 1 << max(0, number - 1).bit_length()


def warps_for(elements: int) -> int:
    """Warps of a program that handles this many elements at once: 4 to 16 of them a thread."""
    return min(16, max(1, next_power_of_2(elements) // 256))


def launches_early(device: torch.device) -> bool:
    """Whether a device can launch a kernel before the one in front is done."""
    return device.type == "cuda" and _capability(device.index) >= (9, 0)


def knows_e4m3(device: torch.device) -> bool:
    """Whether a device converts numbers to float8 e4m3 by itself."""
    return (
        device.type == "cuda" and torch.version.hip is None and _capability(device.index) >= (8, 9)
    )


def program_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have; interpreted ones know no bound."""
    return _shared_memory(device.index) if device.type == "cuda" else 1 << 62


@functools.cache
def _shared_memory(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    more = getattr(properties, "shared_memory_per_block_optin", 0)
    return max(int(properties.shared_memory_per_block), int(more))


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
