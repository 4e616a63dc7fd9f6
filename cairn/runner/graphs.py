"""Decode steps as CUDA graphs: one launch for the whole model.

A step of few slots is padded to the next bucket; its numbers are copied into memory that stays, and
the bucket's graph is replayed. A graph reads lengths, rows and pages from that memory and from the
page table when it runs, never what they were when it was captured. Buckets are captured when they
are first needed; they share their memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.attention.base import AttentionBackend, AttentionLayer, Batch
from cairn.runner.rows import Ints, Layout

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before the capture: kernels are compiled and workspaces taken outside of it."""
NO_SLOT = -1
"""The slot of padding: it sees nothing."""
NO_PAGE = -1
"""The page that padding completes."""


class GraphModel(Protocol):
    """What a graph holds."""

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, V] float32."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a graph's steps happen.

    Attributes:
        backends: layer index -> (backend, layer).
        page_table: [rows, max_pages] int32; its address stays.
        page_size: S.
        spare_page: a page of nobody: padding writes there.
    """

    backends: Mapping[int, tuple[AttentionBackend, AttentionLayer]]
    page_table: Tensor
    page_size: int
    spare_page: int


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Numbers of slots that graphs are captured for, the last of them >= most."""
    found = [1, 2, 4, 8]
    while found[-1] < most:
        found.append(found[-1] + max(8, found[-1] // 4 // 8 * 8))
    return tuple(n for i, n in enumerate(found) if i == 0 or found[i - 1] < most)


class DecodeGraphs:
    """Graphs of decode steps on one device.

    Args:
        model: runs the steps.
        place: where.
        max_rows: requests that run at once; a step of more slots than rows and their landmarks
            has no graph.
    """

    def __init__(self, model: GraphModel, place: Place, max_rows: int) -> None:
        self.model = model
        self.place = place
        # A landmark comes once in a page: more of them than this at once run without a graph.
        self.buckets = buckets_up_to(max_rows + max(1, max_rows // 8))
        device = place.page_table.device
        # Lines of a multiple of 16 bytes: kernels are compiled once for all of them.
        size = -(-self.buckets[-1] // 16) * 16
        self._host = torch.zeros((8, size), dtype=torch.int64, pin_memory=True)
        self._lines: NDArray[np.int64] = self._host.numpy()
        self._device = torch.zeros((8, size), dtype=torch.int64, device=device)
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def logits(self, layout: Layout, last: Ints) -> Tensor | None:
        """Logits [n, V] of the slots `last` [n] of a step; None where no graph fits it.

        They are overwritten by the next step.
        """
        slots = len(layout.slot)
        bucket = next((b for b in self.buckets if b >= slots), None)
        if bucket is None or len(layout.completed) > self._closing(bucket):
            return None
        self._fill(layout, last, bucket)
        captured = self._captured.get(bucket)
        if captured is None:
            captured = self._captured[bucket] = self._capture(bucket)
        captured.graph.replay()
        return captured.logits[: len(last)]

    def _closing(self, bucket: int) -> int:
        """Pages that a step of this bucket may complete."""
        return max(1, bucket // 2) if bucket <= 8 else bucket // 8 + 3

    def _fill(self, layout: Layout, last: Ints, bucket: int) -> None:
        """Copy the step's numbers, and padding behind them, to where the graphs read."""
        place = self.place
        spare = place.spare_page * place.page_size
        parts = (
            (layout.ids, 0),
            (layout.position, 0),
            (layout.row, 0),
            (layout.slot, NO_SLOT),
            (layout.location, spare),
            (layout.completed, 0),
            (layout.completed_pages, NO_PAGE),
            (last, 0),
        )
        for line, (values, padding) in zip(self._lines, parts, strict=True):
            line[: len(values)] = values
            line[len(values) : bucket] = padding
        self._device.copy_(self._host, non_blocking=True)

    def _batch(self, bucket: int) -> Batch:
        """The step as the model reads it: views of the memory that stays."""
        place, lines = self.place, self._device
        closing = self._closing(bucket)
        return Batch(
            input_ids=lines[0, :bucket],
            positions=lines[1, :bucket],
            row=lines[2, :bucket],
            slot=lines[3, :bucket],
            location=lines[4, :bucket],
            page_table=place.page_table,
            completed=lines[5, :closing],
            completed_pages=lines[6, :closing],
            max_slot=place.page_table.shape[1] * place.page_size - 1,
            backends=place.backends,
        )

    def _capture(self, bucket: int) -> _Captured:
        began = time.perf_counter()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The step itself: it may run several times, it writes the same each time.
            for _ in range(WARM_UPS):
                self._run(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._run(bucket)
        seconds = time.perf_counter() - began
        log.info("captured the decode step of %d slots in %.2f s", bucket, seconds)
        return _Captured(graph, logits)

    def _run(self, bucket: int) -> Tensor:
        hidden = self.model(self._batch(bucket))
        return self.model.logits(hidden[self._device[7, :bucket]])
