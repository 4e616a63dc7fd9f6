"""Counters with which the programs of a launch wait for each other or detect the last program.

Counters are 0 before and after every launch: the last program that uses a counter resets it, so no
separate launch clears them.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton

STRIDE = 8
"""Stride between groups of counters, in int32: atomics on one sector of the L2 cache are
serialized."""
GRAPH_BLOCK = 1 << 20
"""Counters of a memory block from which each captured graph gets its own, permanent part."""
MAX_GRAPH_BLOCKS = 8
"""Most such blocks per device."""
_STREAM_COUNTERS = 1 << 12
"""Initial number of counters per stream."""


@triton.jit
def arrive(counter):
    """Increment the counter and return its previous value. Stores of the programs that arrived
    before are visible to this program, and its own stores to every program that arrives later."""
    # The barrier orders the stores of all threads before the atomic of one of them.
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def await_arrivals(counter, wanted):
    """Wait until `wanted` programs have called `arrive`; their stores are then visible.

    A program may only wait for programs with lower ids. Programs start in the order of their ids,
    so a waiting program never blocks one that it waits for from starting."""
    arrived = tl.atomic_add(counter, 0, sem="relaxed", scope="gpu")
    while arrived < wanted:
        arrived = tl.atomic_add(counter, 0, sem="relaxed", scope="gpu")
    tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


def counters(groups: int, device: torch.device) -> Tensor:
    """[groups, STRIDE] int32 zeros for the next launch, which must reset them to 0."""
    tensor = _counters(groups, device)
    if gpu.watch.observer is not None:
        gpu.watch.observer.allocated(tensor, functools.partial(_counters, groups, device), False)
    return tensor


def _counters(groups: int, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.zeros((groups, STRIDE), dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _store(device.index).of_graph(gpu.stream_of(device.index), groups, device)
    return _store(device.index).of_stream(gpu.stream_of(device.index), groups, device)


class _Store:
    """The counters of a device.

    Launches of one stream, or of one captured graph, run one after the other and share counters.
    Graphs may run concurrently with each other and with streams, so each graph has its own.
    """

    def __init__(self, max_blocks: int = MAX_GRAPH_BLOCKS) -> None:
        """max_blocks: blocks for graphs; when they are used up, captured launches allocate and zero
        their counters."""
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._of_streams: dict[int, Tensor] = {}
        self._of_graphs: dict[int, tuple[int, Tensor]] = {}
        self._blocks: list[Tensor] = []
        self._left = 0

    def of_stream(self, stream: int, groups: int, device: torch.device) -> Tensor:
        """Counters for the next launch on a stream."""
        found = self._of_streams.get(stream)
        if found is None or len(found) < groups:
            size = max(_STREAM_COUNTERS // STRIDE, gpu.next_power_of_2(groups))
            found = torch.zeros((size, STRIDE), dtype=torch.int32, device=device)
            self._of_streams[stream] = found
        if self._left < GRAPH_BLOCK // STRIDE // 2 and len(self._blocks) < self._max_blocks:
            self._add_block(device)
        return found[:groups]

    def of_graph(self, stream: int, groups: int, device: torch.device) -> Tensor:
        """Counters for a launch on a stream that is being captured."""
        graph = gpu.capture_of(device)
        last = self._of_graphs.get(stream)
        # Without a graph id each launch gets its own counters.
        if graph and last is not None and last[0] == graph and len(last[1]) >= groups:
            return last[1][:groups]
        with self._lock:
            if groups > self._left:
                return torch.zeros((groups, STRIDE), dtype=torch.int32, device=device)
            begin = len(self._blocks[-1]) - self._left
            self._left -= groups
            found = self._blocks[-1][begin : begin + groups]
        self._of_graphs[stream] = (graph, found)
        return found

    def _add_block(self, device: torch.device) -> None:
        fresh = torch.zeros((GRAPH_BLOCK // STRIDE, STRIDE), dtype=torch.int32, device=device)
        # Replays of a graph do not synchronize with the stream that zeroes the block here.
        torch.cuda.current_stream(device).synchronize()
        with self._lock:
            self._blocks.append(fresh)
            self._left = len(fresh)


@functools.cache
def _store(index: int) -> _Store:
    return _Store()
