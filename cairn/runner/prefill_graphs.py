"""Steps with prefills as CUDA graphs: one launch for the whole model.

Up to some hundreds or thousands of slots the host takes longer to queue the kernels of a step than
a GPU to run them. So such a step is padded to the next bucket, its inputs are written to the
buffers of the bucket's graph, and the graph is replayed. As with decode graphs, nothing in it
depends on values at capture. The few kernels after the model depend on which rows sample and are
launched eagerly.
"""

from __future__ import annotations

import bisect
import functools
import logging
import time
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.attention.cuts import UNCHUNKED, WHOLE, Cuts
from cairn.ops.planning import is_traced
from cairn.runner.buffers import StepBuffers
from cairn.runner.capture import Captured, capture
from cairn.runner.graphs import DecodeGraphs
from cairn.runner.rows import Layout, filled, write_cells

log = logging.getLogger(__name__)

MOST = 8192
"""Slots of the largest bucket of any model."""
BUSY = 1.04e11
"""Slots times weights per layer at which a GPU takes as long as the host; a layer that selects
pages has twice the kernels and counts as two. An H100 with 7.3e9 weights in 32 layers, 8 of which
select, still waited for the host in steps of 576 slots, no longer in those of 640."""
SMALLEST, LARGE = 16, 512
MORE_PAGES = 16
"""Pages that a step of several rows may complete in addition to those of a single row."""


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Bucket sizes (slots) of graphs, the last of them `most` or a little more. Padding is less
    than SMALLEST slots or a fifth of the bucket, from LARGE slots on a ninth."""
    found = [SMALLEST]
    while found[-1] < most:
        octave = 1 << found[-1].bit_length() - 1
        found.append(found[-1] + max(SMALLEST, octave // (4 if octave < LARGE else 8)))
    return tuple(found)


def worthwhile(weights: int, layers: int) -> int:
    """Largest step in slots that runs as a graph, by number of weights: larger steps keep the
    device busy anyway, and padding would only cost time.

    Args:
        weights: parameters.
        layers: number of layers, those that select counted twice.
    """
    return max(SMALLEST, min(MOST, int(BUSY * layers / weights)))


class Kind(NamedTuple):
    """The key of a graph.

    Attributes:
        slots: slots of its bucket.
        cuts: how attention cuts the step into tiles. With many slots, `chunked` makes no
            difference.
    """

    slots: int
    cuts: Cuts


class PrefillGraphs:
    """Graphs of steps of any kind on one device.

    Args:
        decoding: the decode graphs of the same model.
        most: slots of the largest graph, see `worthwhile`.
    """

    def __init__(self, decoding: DecodeGraphs, most: int) -> None:
        self.buckets = buckets_up_to(most)
        self._model, self._place, self._pool = decoding.model, decoding.place, decoding.pool
        self._longest = self._place.backends.longest_in_graphs
        self._cutter = self._place.backends.cutter
        device = self._place.rows.device
        self._buffers = StepBuffers(self.buckets[-1], self._place.spare_locations, device)
        self._captured: dict[Kind, Captured] = {}
        self._too_large: set[Kind] = set()
        self._ahead: list[Kind] | None = None

    def run(self, layout: Layout) -> Tensor | None:
        """Launch the model on a step, after writing its changes of the page tables; None, and
        nothing is launched, if no graph fits.

        Returns:
            Hidden states [T, hidden] of its slots; the next step overwrites them.
        """
        count = len(layout.slot)
        at = bisect.bisect_left(self.buckets, count)
        if at == len(self.buckets):
            return None
        if len(layout.arrays.completed) > self._closing(self.buckets[at]):
            return None
        if is_traced(self._buffers.memory):
            # Hooks and dispatch modes would not see the ops of a graph.
            return None
        if layout.inserts:
            return None
        kind = Kind(self.buckets[at], self._cutter.of_bucket(layout.rows, self.buckets[at]))
        # Rows with guesses have few tokens, like rows that decode, and use the same kernels.
        few = layout.rows.drafts is not None and not kind.cuts.chunked
        if self._longest is not None and not few and int(layout.slot.max()) >= self._longest:
            return None
        self.prepare(kind)
        if kind in self._too_large:
            return None
        write_cells(self._place.rows.tables, layout.grants)
        self._buffers.write(layout.arrays, kind.slots)
        return self._captured[kind].replay(count)

    def kinds(self) -> list[Kind]:
        """All kinds, the largest first, so that the others reuse its memory."""
        num_rows = len(self._place.rows.page_tables[0])
        chunked = [
            Kind(bucket, cuts)
            for bucket in self.buckets[::-1]
            for cuts in self._cutter.all_of_bucket(bucket, num_rows)
        ]
        return chunked + [Kind(n, WHOLE) for n in self.buckets[::-1] if n <= UNCHUNKED]

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the steps of all graphs on padding, without a capture."""
        for kind in self.kinds():
            self._buffers.write(None, kind.slots)
            self._run(kind, True)

    def prepare(self, kind: Kind) -> None:
        """Capture a kind's graph, if it is missing and there is memory for it."""
        if kind in self._captured or kind in self._too_large:
            return
        began = time.perf_counter()
        # Graphs captured here run once on padding before capture.
        self._buffers.write(None, kind.slots)
        try:
            run = functools.partial(self._run, kind)
            self._captured[kind] = capture(run, self._pool, self._place.group)
        except torch.OutOfMemoryError as error:
            self._too_large.add(kind)
            log.warning("steps of %d slots run without a graph: %s", kind.slots, error)
            return
        log.info("captured steps of %d slots in %.2f s", kind.slots, time.perf_counter() - began)

    def prepare_next(self) -> bool:
        """Capture the largest kind that is missing; False: none is."""
        if self._ahead is None:
            self._ahead = self.kinds()[::-1]
        while self._ahead:
            kind = self._ahead.pop()
            if kind not in self._captured and kind not in self._too_large:
                self.prepare(kind)
                return True
        return False

    def _closing(self, bucket: int) -> int:
        """Pages that a step of this bucket may complete."""
        return min(bucket, bucket // self._place.rows.slots.page_size + MORE_PAGES)

    def _run(self, kind: Kind, rehearsal: bool) -> Tensor:
        """Run the model on the step in the buffers, in a rehearsal too."""
        rows = self._place.rows
        fields = self._buffers.fields(kind.slots, self._closing(kind.slots))
        fields = fields._replace(ids=filled(fields.ids, fields.row, rows.last_token))
        batch = fields.batch(rows.page_tables, rows.capacity - 1)
        return self._model(self._place.backends.step(batch, kind.cuts))
