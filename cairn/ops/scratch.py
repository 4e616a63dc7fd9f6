"""Memory on the CPU that is used again and again, and so stays in the caches.

What malloc gives for a tensor of megabytes may lie anywhere: it has to be fetched before it can be
written, and takes the place of something that is still needed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class _Held(threading.local):
    """The memory of a thread."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, torch.dtype], Tensor] = {}


_held = _Held()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory, the same at every call of this thread with this name and dtype.

    Nothing in it outlives the next call, so no result of an op may lie there. It grows to the
    largest shape asked for and is never given back.

    Args:
        name: what it is for.
        shape: of the tensor, contiguous.
        dtype: of its elements.
    """
    size = math.prod(shape)
    memory = _held.by_name.get((name, dtype))
    if memory is None or memory.numel() < size:
        # What is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            memory = _held.by_name[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
    return memory[:size].view(shape)
