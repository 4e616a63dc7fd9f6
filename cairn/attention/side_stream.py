"""Two parts of a step concurrently, on two streams of a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def side_by_side(small: Callable[[], None], large: Callable[[], None]) -> None:
    """Queue both on the current stream's device while a graph is captured: `small` on a second
    stream, `large` on the current one. Both wait for earlier work on the current stream, and later
    work on it waits for both.

    The stream that is queued first is scheduled first. On NVIDIA GPUs that is `small`: after a
    kernel that fills the device, a chain of small kernels would run alone. On AMD GPUs the first
    one continues the hardware queue of the earlier work; that is `large`.

    Memory that `small` allocates belongs to its stream: only a later call reuses it, which starts
    after all kernels that read it.
    """
    main = torch.cuda.current_stream()
    side = _stream(main.device_index)
    side.wait_stream(main)
    for work in (large, small) if torch.version.hip else (small, large):
        with torch.cuda.stream(side if work is small else main):
            work()
    main.wait_stream(side)
