"""CUDA graphs of whole steps: captured once, replayed with one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cairn import ops
from cairn.distributed.groups import ALONE, Group
from cairn.errors import OutOfMemory

WARM_UPS = 2
"""Warm-up runs before a capture, which compile kernels and allocate workspaces."""


class Captured:
    """A graph and its output, and the output sliced to the rows of the last step.

    The output's memory is the pool's: the next graph of the pool that is replayed may write there.
    """

    __slots__ = ("_cut", "_rows", "graph", "output")

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.graph = graph
        self.output = self._cut = output
        self._rows = len(output)

    def replay(self, rows: int) -> Tensor:
        """Launch the graph; returns its output for `rows` rows."""
        self.graph.replay()
        if self._rows != rows:
            self._rows, self._cut = rows, self.output[:rows]
        return self._cut


@functools.cache
def _beside(device: int) -> torch.cuda.Stream:
    """The stream on which graphs of a device are captured. Always the same one, because libraries
    keep tens of MiB for every stream that they were used on."""
    return torch.cuda.Stream(device)


@torch.inference_mode()
def capture(run: Callable[[bool], Tensor], pool: Any, group: Group = ALONE) -> Captured:
    """Capture `run` as a graph; `run` is told whether the call is a rehearsal.

    Args:
        run: launches a step and returns its output.
        pool: memory shared by graphs that never run at the same time
            (torch.cuda.graph_pool_handle).
        group: ranks that capture the same graph at the same time.

    Raises:
        torch.OutOfMemoryError: the graph takes more memory than is free, on this rank or another;
            or the step does, where there is one rank.
        OutOfMemory: the step does, and others wait in its collectives.
    """
    stream = _beside(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run(True)
    except torch.OutOfMemoryError as error:
        if group.alone:
            raise
        raise OutOfMemory(
            f"the steps of all rows do not fit beside the pages ({error})",
            "Lower kv_cache_memory (--kv-cache-memory), or give --disable-cuda-graph",
        ) from error
    finally:
        # Work that a failed run has queued still reads buffers that the next step would overwrite.
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, which mode "global" forbids to all threads.
    mode = "thread_local"
    failed: torch.OutOfMemoryError | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            output = run(False)
    except torch.OutOfMemoryError as error:
        failed = error
    # A rank that replayed the graph without the others would wait for them for ever.
    if not group.alone and not group.least(int(failed is None), torch.device("cuda")):
        failed = failed or torch.OutOfMemoryError("another rank has no memory for the graph")
    if failed is not None:
        raise failed
    # A live tensor would keep its memory from other graphs of the pool.
    return Captured(graph, ops.weak_ref_tensor(output))
