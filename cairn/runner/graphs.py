"""Decode steps as CUDA graphs: one launch for the whole model and the sampler.

A step of few slots is padded to the next bucket; its numbers are copied into memory that stays, and
the bucket's graph is replayed. A graph reads lengths, rows and pages from that memory and from the
page table when it runs, never what they were when it was captured; the tokens that it chooses stay
on the device for the next step. Buckets are captured when they are first needed; they share their
memory.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, AttentionLayer, Batch
from cairn.runner.rows import NO_CELLS, Layout, filled, write_cells
from cairn.runner.sampler import Draws
from cairn.runner.staging import Lines
from cairn.runner.step import Ints

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before the capture: kernels are compiled and workspaces taken outside of it."""
NO_SLOT = -1
"""The slot of padding: it sees nothing."""
NO_PAGE = -1
"""The page that padding completes."""
BATCH_LINES = 9
"""Lines of a graph's memory that are the batch's, and cells of the page tables with their pages;
where layers have pages of their own, a line of their locations follows. Then come the last slots,
their rows and the draws."""
FLOATS = ("temperature", "top_p", "min_p")


class GraphModel(Protocol):
    """What a graph holds."""

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, V] float32."""


class Ending(Enum):
    """How a graph ends."""

    LOGITS = "logits"
    GREEDY = "most likely tokens"
    DRAW = "drawn tokens"


class Sampling(NamedTuple):
    """Which slots of a step choose a token, and how.

    Attributes:
        last: [n], their indices in the batch.
        row: [n], their rows.
        ending: what the graph does with their logits.
        draws: for Ending.DRAW.
    """

    last: Ints
    row: Ints
    ending: Ending
    draws: Draws | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a graph's steps happen.

    Attributes:
        backends: layer index -> (backend, layer).
        tables: all page tables, see Rows; their address stays.
        page_table: [rows, max_pages] int32, that of most layers, a part of them.
        last_token: [rows + 1] int64, see Rows; its address stays.
        page_size: S.
        spare_page: a page of nobody: padding writes there.
        window_table: of layers with pages of their own; None without such layers.
        window_spare_page: of theirs.
    """

    backends: Mapping[int, tuple[AttentionBackend, AttentionLayer]]
    tables: Tensor
    page_table: Tensor
    last_token: Tensor
    page_size: int
    spare_page: int
    window_table: Tensor | None = None
    window_spare_page: int = 0


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


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
        max_rows: requests that run at once; each takes a slot in a step, and one more where its
            landmark follows.
    """

    def __init__(self, model: GraphModel, place: Place, max_rows: int) -> None:
        self.model = model
        self.place = place
        self.buckets = buckets_up_to(2 * max_rows)
        device = place.page_table.device
        # Lines of a multiple of 16 bytes: kernels are compiled once for all of them.
        self._width = -(-self.buckets[-1] // 16) * 16
        values = [0, 0, 0, NO_SLOT, place.spare_page * place.page_size, 0, NO_PAGE]
        values += [place.tables.numel() - 1, 0]
        if place.window_table is not None:
            values.append(place.window_spare_page * place.page_size)
        self._last = len(values)
        values += [0, len(place.last_token) - 1]
        lines = len(values) + len(Draws._fields)
        padding = np.zeros((lines, self._width), dtype=np.int64)
        padding[: len(values)] = np.array(values)[:, None]
        # Padding draws its largest logit: temperature 0.
        self._lines = Lines(padding, device)
        self._device = self._lines.device
        self._captured: dict[tuple[int, Ending], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, layout: Layout, sampling: Sampling) -> Tensor | None:
        """Run a step; None where no graph fits it.

        Returns:
            The logits [n, V] float32 of the slots that choose a token, or with another ending the
            tokens [n] int64, which `last_token` then holds as well. The next step overwrites it.
        """
        slots = len(layout.slot)
        at = bisect.bisect_left(self.buckets, slots)
        if at == len(self.buckets) or len(layout.completed) > self._closing(self.buckets[at]):
            return None
        bucket = self.buckets[at]
        self._fill(layout, sampling, bucket)
        key = bucket, sampling.ending
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        captured.graph.replay()
        return captured.output[: len(sampling.last)]

    def _closing(self, bucket: int) -> int:
        """Pages that a step of this bucket may complete: each takes two of its slots."""
        return max(1, bucket // 2)

    def _fill(self, layout: Layout, sampling: Sampling, bucket: int) -> None:
        """Copy the step's numbers, and padding behind them, to where the graphs read."""
        cells, granted = layout.cells, layout.granted
        if len(cells) > bucket:
            write_cells(self.place.tables, cells, granted)
            cells, granted = NO_CELLS
        own = () if layout.window_location is None else (layout.window_location,)
        self._lines.send(
            (
                *(layout.ids, layout.position, layout.row, layout.slot, layout.location),
                *(layout.completed, layout.completed_pages, cells, granted, *own),
                *(sampling.last, sampling.row, *(sampling.draws or ())),
            ),
            bucket,
        )

    def _batch(self, bucket: int) -> Batch:
        """The step as the model reads it: views of the memory that stays."""
        place, lines = self.place, self._device
        closing = self._closing(bucket)
        row = lines[2, :bucket]
        own = place.window_table
        return Batch(
            input_ids=filled(lines[0, :bucket], row, place.last_token),
            positions=lines[1, :bucket],
            row=row,
            slot=lines[3, :bucket],
            location=lines[4, :bucket],
            page_table=place.page_table,
            completed=lines[5, :closing],
            completed_pages=lines[6, :closing],
            max_slot=place.page_table.shape[1] * place.page_size - 1,
            backends=place.backends,
            window_place=None if own is None else (own, lines[BATCH_LINES, :bucket]),
        )

    @torch.inference_mode()
    def _capture(self, bucket: int, ending: Ending) -> _Captured:
        began = time.perf_counter()
        kept = self.place.last_token.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The step itself: it may run several times, it writes the same each time.
            for _ in range(WARM_UPS):
                self._run(bucket, ending)
                self.place.last_token.copy_(kept)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._run(bucket, ending)
        seconds = time.perf_counter() - began
        log.info(
            "captured the decode step of %d slots, %s, in %.2f s", bucket, ending.value, seconds
        )
        return _Captured(graph, output)

    def _run(self, bucket: int, ending: Ending) -> Tensor:
        lines = self._device[:, :bucket]
        granted = lines[8].view(torch.int32)[:bucket]
        self.place.tables.view(-1).index_copy_(0, lines[7], granted)
        hidden = self.model(self._batch(bucket))
        logits = self.model.logits(hidden[lines[self._last]])
        if ending is Ending.LOGITS:
            return logits
        if ending is Ending.GREEDY:
            tokens: Tensor = ops.argmax_tokens(logits)
        else:
            draws = [
                line.view(torch.float32)[:bucket] if name in FLOATS else line[:bucket]
                for name, line in zip(Draws._fields, self._device[self._last + 2 :], strict=True)
            ]
            tokens = ops.draw_tokens(logits, *draws)
        self.place.last_token[lines[self._last + 1]] = tokens
        return tokens
