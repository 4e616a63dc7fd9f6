"""Counters by which the programs of one launch wait for each other, or find the last one.

A counter is 0 before and after every launch: the last program that needs it resets it. So no
separate launch has to clear counters first.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton

APART = 8
"""Stride between groups of counters, in int32: atomics on one sector of the L2 cache are
serialized."""
KEPT = 1 << 20
"""Counters of a block of memory that captured graphs take their own, permanent parts of."""
MAX_KEPT = 8
"""Such blocks of a device."""
_FIRST = 1 << 12
"""Counters that the launches of a stream share at first."""


@triton.jit
def arrive(counter):
    """Count this program and return how many were counted before it. Their stores are visible to
    this program now, and its own stores to every program that is counted later."""
    # The barrier orders the stores of all threads before the atomic of one of them.
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def await_arrivals(counter, wanted):
    """Wait until `wanted` programs have called `arrive`; their stores are then visible.

    A program may only wait for programs with lower ids than its own. Programs start in the order of
    their ids, so a waiting program never occupies the place of one that it waits for.
    """
    here = tl.atomic_add(counter, 0, sem="relaxed", scope="gpu")
    while here < wanted:
        here = tl.atomic_add(counter, 0, sem="relaxed", scope="gpu")
    tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


def counters(groups: int, device: torch.device) -> Tensor:
    """[groups, APART] int32, all 0, for the one launch that comes next. It leaves them 0."""
    tensor = _taken(groups, device)
    if gpu.watch.observer is not None:
        gpu.watch.observer.took(tensor, functools.partial(_taken, groups, device), False)
    return tensor


def _taken(groups: int, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.zeros((groups, APART), dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _store(device.index).of_graph(gpu.stream_of(device.index), groups, device)
    return _store(device.index).of_stream(gpu.stream_of(device.index), groups, device)


class _Store:
    """The counters of a device.

    Launches of a stream run one after the other, and so do those of a captured graph: they share
    counters. Graphs may run concurrently with each other and with streams, so each has its own.
    """

    def __init__(self, most_kept: int = MAX_KEPT) -> None:
        """most_kept: blocks for graphs; when they are used up, captured launches clear counters."""
        self._most_kept = most_kept
        self._lock = threading.Lock()
        self._of_streams: dict[int, Tensor] = {}
        self._of_graphs: dict[int, tuple[int, Tensor]] = {}
        self._kept: list[Tensor] = []
        self._left = 0

    def of_stream(self, stream: int, groups: int, device: torch.device) -> Tensor:
        """For a launch that comes next on a stream."""
        found = self._of_streams.get(stream)
        if found is None or len(found) < groups:
            size = max(_FIRST // APART, gpu.next_power_of_2(groups))
            found = torch.zeros((size, APART), dtype=torch.int32, device=device)
            self._of_streams[stream] = found
        if self._left < KEPT // APART // 2 and len(self._kept) < self._most_kept:
            self._keep_more(device)
        return found[:groups]

    def of_graph(self, stream: int, groups: int, device: torch.device) -> Tensor:
        """For a launch that a stream is captured with."""
        graph = gpu.capture_of(device)
        last = self._of_graphs.get(stream)
        # Graphs without an id: each launch has counters of its own.
        if graph and last is not None and last[0] == graph and len(last[1]) >= groups:
            return last[1][:groups]
        with self._lock:
            if groups > self._left:
                return torch.zeros((groups, APART), dtype=torch.int32, device=device)
            begin = len(self._kept[-1]) - self._left
            self._left -= groups
            found = self._kept[-1][begin : begin + groups]
        self._of_graphs[stream] = (graph, found)
        return found

    def _keep_more(self, device: torch.device) -> None:
        fresh = torch.zeros((KEPT // APART, APART), dtype=torch.int32, device=device)
        # A replay of a graph does not wait for the stream that clears them here.
        torch.cuda.current_stream(device).synchronize()
        with self._lock:
            self._kept.append(fresh)
            self._left = len(fresh)


@functools.cache
def _store(index: int) -> _Store:
    return _Store()
