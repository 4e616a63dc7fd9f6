"""Steps with prefills as CUDA graphs: one launch for the whole model.

Up to some hundreds or thousands of slots the host takes longer to queue the kernels of a step than
a GPU to run them. So such a step is padded to the next bucket; what its slots are is written where
the bucket's graph reads, and the graph is replayed. As with decode steps, nothing in it depends on
what the step was when it was captured. What follows the model, a few kernels, depends on who wants
which tokens and is queued one by one.
"""

from __future__ import annotations

import bisect
import functools
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.attention.base import (
    CHUNK,
    LEAST_EARLY,
    ROUND,
    AttentionLayer,
    Batch,
    Front,
    alone,
    fewest_rows,
    fronts_of,
)
from cairn.ops.launch_cache.plans import is_traced
from cairn.runner.capture import Captured, capture
from cairn.runner.graphs import DecodeGraphs
from cairn.runner.rows import Layout, filled, write_cells
from cairn.runner.staging import overwrite

log = logging.getLogger(__name__)

MOST = 8192
"""Slots of the largest bucket of any model."""
BUSY = 1.04e11
"""Slots times weights of a layer that keep a GPU as busy as the host; a landmark layer, with twice
the kernels, counts as two. An H100 with 7.3e9 weights in 32 layers, 8 of them with landmarks, still
waited for the host in steps of 576 slots, no longer in those of 640."""
UNCHUNKED = 256
"""Slots of the largest bucket with graphs of its own for steps of slots that are no chunks."""
SMALLEST, LARGE = 16, 512
MORE_PAGES = 16
"""Pages that a step of several rows may complete beside those that the slots of one row would."""
LINES = 8


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Numbers of slots that graphs are captured for, the last of them `most` or a few more. Less
    than SMALLEST slots are padding, or than a fifth of a bucket, of a large one than a ninth."""
    found = [SMALLEST]
    while found[-1] < most:
        octave = 1 << found[-1].bit_length() - 1
        found.append(found[-1] + max(SMALLEST, octave // (4 if octave < LARGE else 8)))
    return tuple(found)


def worthwhile(weights: int, layers: Sequence[AttentionLayer]) -> int:
    """Slots up to which steps of a model of so many weights are graphs; in larger ones the device
    would do the padding for nothing."""
    count = len(layers) + sum(layer.selects for layer in layers)
    return max(SMALLEST, min(MOST, int(BUSY * count / weights)))


class Kind(NamedTuple):
    """What a graph is captured for.

    Attributes:
        slots: of its bucket.
        chunked, alone, fronts: see Batch. Of many slots, `chunked` makes no difference.
    """

    slots: int
    chunked: bool
    alone: int = 0
    fronts: tuple[Front, ...] = ()


class PrefillGraphs:
    """Graphs of steps of any kind on one device.

    Args:
        decoding: those of decode steps, of the same model in the same place.
        most: slots of the largest graph, see `worthwhile`.
    """

    def __init__(self, decoding: DecodeGraphs, most: int) -> None:
        self.buckets = buckets_up_to(most)
        self._model, self._place, self._pool = decoding.model, decoding.place, decoding.pool
        limits = [backend.longest_in_graphs for backend, _ in self._place.backends.values()]
        self._longest = min((limit for limit in limits if limit is not None), default=None)
        self._fronts = fronts_of(self._place.backends.values(), self._place.slots.page_size)
        self._memory = torch.zeros(
            LINES * self.buckets[-1], dtype=torch.int64, device=self._place.page_table.device
        )
        self._captured: dict[Kind, Captured] = {}
        self._too_large: set[Kind] = set()

    def run(self, layout: Layout) -> Tensor | None:
        """Queue the model's pass over a step, and before it what it changes in the page tables;
        None, and nothing is queued, where no graph fits.

        Returns:
            Hidden states [T, hidden] of its slots; the next step overwrites them.
        """
        count = len(layout.slot)
        at = bisect.bisect_left(self.buckets, count)
        if at == len(self.buckets) or len(layout.completed) > self._closing(self.buckets[at]):
            return None
        if self._longest is not None and int(layout.slot.max()) >= self._longest:
            return None
        if is_traced(self._memory):
            # Nobody sees the ops of a graph.
            return None
        bucket = self.buckets[at]
        chunked = layout.chunked or bucket > UNCHUNKED
        apart = alone(layout.decoding, bucket) if chunked else 0
        kind = Kind(bucket, chunked, apart, self._front(layout, bucket, apart) if chunked else ())
        self.prepare(kind)
        if kind in self._too_large:
            return None
        write_cells(self._place.tables, layout.grants)
        overwrite(self._lines(bucket), self._numbers(bucket, layout))
        return self._captured[kind].replay(count)

    def kinds(self) -> list[Kind]:
        """All that there can be, the largest first: the others find its memory."""
        buckets, rows = self.buckets[::-1], len(self._place.page_table)
        chunked = []
        for bucket in buckets:
            # Few slots are chunks only where they are of few rows.
            most = rows if bucket > UNCHUNKED else min(rows, bucket // CHUNK)
            for apart in sorted({alone(decoding, bucket) for decoding in range(most)}):
                chunked += [
                    Kind(bucket, True, apart, fronts) for fronts in self._choices(bucket, apart)
                ]
        return chunked + [Kind(bucket, False) for bucket in buckets if bucket <= UNCHUNKED]

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Queue what each graph there can be would hold, of padding alone."""
        for kind in self.kinds():
            overwrite(self._lines(kind.slots), self._numbers(kind.slots, None))
            self._run(kind, True)

    def prepare(self, kind: Kind) -> None:
        """Capture a kind's graph, if that has not been done and there is memory for it."""
        if kind in self._captured or kind in self._too_large:
            return
        began = time.perf_counter()
        # What is captured on the way rehearses with padding alone.
        overwrite(self._lines(kind.slots), self._numbers(kind.slots, None))
        try:
            self._captured[kind] = capture(functools.partial(self._run, kind), self._pool)
        except torch.OutOfMemoryError as error:
            self._too_large.add(kind)
            log.warning("steps of %d slots run without a graph: %s", kind.slots, error)
            return
        log.info("captured steps of %d slots in %.2f s", kind.slots, time.perf_counter() - began)

    def _choices(self, bucket: int, apart: int) -> list[tuple[Front, ...]]:
        """What of the slots behind those apart may be of fronts: nothing, what is of a row from its
        start on, or all of the first. Of those apart, what rows that decode leave are the row's
        first."""
        slots, past = bucket - apart, apart - fewest_rows(apart, bucket)
        found: list[tuple[Front, ...]] = [()]
        if self._fronts and slots:
            found.append((Front(slots, self._fronts[0].pages),))
        row: list[Front] = []
        for number, limit in enumerate(self._fronts):
            count = min(slots, (limit.slots - past) // ROUND * ROUND)
            if 0 < count == slots or (number == 0 and count >= LEAST_EARLY):
                row.append(Front(count, limit.pages))
                slots, past = slots - count, past + count
        return sorted({*found, tuple(row)})

    def _front(self, layout: Layout, bucket: int, apart: int) -> tuple[Front, ...]:
        """The most of these that holds."""
        choices = self._choices(bucket, apart)
        held = (n for n in choices if layout.within(apart, n, self._fronts))
        return max(held, key=lambda fronts: [(front.slots, -front.pages) for front in fronts])

    def _closing(self, bucket: int) -> int:
        """Pages that a step of this bucket may complete."""
        return min(bucket, bucket // self._place.slots.page_size + MORE_PAGES)

    def _lines(self, bucket: int) -> Tensor:
        """[LINES, bucket] int64, where a bucket's graph reads."""
        return self._memory[: LINES * bucket].view(LINES, bucket)

    def _numbers(self, bucket: int, layout: Layout | None) -> NDArray[np.int64]:
        """What stands in the lines: the slots of a step, and padding behind them."""
        place, size = self._place, self._place.slots.page_size
        spare, own = place.spare_page * size, place.window_spare_page * size
        numbers = np.empty((LINES, bucket), dtype=np.int64)
        numbers[:] = np.array([0, 0, 0, -1, spare, 0, -1, own])[:, None]
        if layout is not None:
            lines = (layout.ids, layout.position, layout.row, layout.slot, layout.location)
            pages = (layout.completed, layout.completed_pages)
            window = () if layout.window_location is None else (layout.window_location,)
            for line, values in zip(numbers, (*lines, *pages, *window), strict=False):
                line[: len(values)] = values
        return numbers

    def _run(self, kind: Kind, rehearsal: bool) -> Tensor:
        """The step as it stands in the lines; a rehearsal is no different."""
        place, lines = self._place, self._lines(kind.slots)
        closing, own = self._closing(kind.slots), place.window_table
        most = place.page_table.shape[1] * place.slots.page_size
        batch = Batch(
            input_ids=filled(lines[0], lines[2], place.last_token),
            positions=lines[1],
            row=lines[2],
            slot=lines[3],
            location=lines[4],
            page_table=place.page_table,
            completed=lines[5, :closing],
            completed_pages=lines[6, :closing],
            max_slot=most - 1,
            backends=place.backends,
            chunked=kind.chunked,
            alone=kind.alone,
            fronts=kind.fronts,
            window_place=None if own is None else (own, lines[7]),
        )
        return self._model(batch)
