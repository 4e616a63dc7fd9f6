"""Decode steps as CUDA graphs: one launch for the whole model and the sampler.

A step of few slots is padded to the next bucket; its rows and their lengths are written where the
bucket's graph reads, which is replayed. A graph works slots and locations out from them and the
page table when it runs, never from what they were when it was captured; the tokens that it chooses
stay on the device for the next step and go to the host as well. Buckets are captured when they are
first needed; they share their memory.
"""

from __future__ import annotations

import bisect
import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.cuts import decode_cuts
from cairn.attention.registry import Backends
from cairn.attention.step import Step
from cairn.runner.buffers import StepFields
from cairn.runner.capture import Captured, capture
from cairn.runner.logprobs import lines_of
from cairn.runner.rows import NO_GRANTS, Grants, Rows, write_cells
from cairn.runner.sampler import Draws
from cairn.runner.staging import Lines, Trip
from cairn.runner.step import DecodeWork

log = logging.getLogger(__name__)

ROW_LINES = 4
"""Lines of a graph's memory that say what runs: the rows, the tokens of each that have run, and
cells of the page tables with the pages that these hold now. The draws follow."""
FLOATS = ("temperature", "top_p", "min_p")


class GraphModel(Protocol):
    """What a graph holds."""

    def __call__(self, step: Step) -> Tensor:
        """Hidden states [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, V] float32."""


class Ending(Enum):
    """How a graph ends."""

    LOGITS = "logits"
    GREEDY = "most likely tokens"
    DRAW = "drawn tokens"
    REPORT = "drawn tokens and others"


class Sampling(NamedTuple):
    """How the rows of a step choose their tokens.

    Attributes:
        ending: what the graph does with their logits.
        draws: by what they are drawn, there or from the logits; None, but not where others are
            reported: each is the most likely one.
    """

    ending: Ending
    draws: Draws | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Buffers, page tables and backends that graphs run on.

    Attributes:
        backends: of the model's layers.
        rows: page tables and last tokens; their addresses stay.
        spare_pages: by page group, a spare page, to which padding writes.
    """

    backends: Backends
    rows: Rows
    spare_pages: tuple[int, ...]

    @property
    def spare_locations(self) -> tuple[int, ...]:
        """By page group, a slot of the spare page, to which padding is written."""
        size = self.rows.slots.page_size
        return tuple(page * size for page in self.spare_pages)


class Replayed(NamedTuple):
    """A step that a graph runs.

    Attributes:
        output: what the graph gives, of the rows that run.
        trip: gives the step's tokens; those chosen from logits once `answer` has been told them.
        draws: with logits the sampling's, on the device; None without.

    The next step overwrites what lies on the device.
    """

    output: Tensor
    trip: Trip
    draws: Sequence[Tensor] | None = None


class DecodeLines(NamedTuple):
    """What `ops.decode_slots` works out, [W] each: a step's fields, and the index of each row's
    token among the slots."""

    ids: Tensor
    position: Tensor
    row: Tensor
    slot: Tensor
    location: Tensor
    completed: Tensor
    completed_pages: Tensor
    window_location: Tensor
    last: Tensor


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Numbers of slots that graphs are captured for, the last of them >= most."""
    found = [1, 2, 4, 8]
    while found[-1] < most:
        found.append(found[-1] + max(8, found[-1] // 4 // 8 * 8))
    return tuple(n for i, n in enumerate(found) if i == 0 or found[i - 1] < most)


def _whole(bucket: int) -> int:
    """Numbers in a bucket's lines: kernels are compiled once for all multiples of 16."""
    return -(-bucket // 16) * 16


class DecodeGraphs:
    """Graphs of decode steps on one device.

    Args:
        model: runs the steps.
        place: where.
        max_rows: requests that run at once; each takes a slot in a step, and one more where the end
            of its page follows.

    Attributes:
        pool: memory of all graphs of the device.
    """

    def __init__(self, model: GraphModel, place: Place, max_rows: int) -> None:
        self.model = model
        self.place = place
        self.buckets = buckets_up_to(2 * max_rows)
        device = place.rows.device
        # Padding rows have temperature 0: they take their largest logit.
        padding = [len(place.rows.last_token) - 1, 0, place.rows.tables.numel() - 1, 0]
        self._lines = Lines(
            [*padding, *(0 for _ in Draws._fields)], _whole(self.buckets[-1]), device
        )
        self._device = self._lines.device
        self._captured: dict[tuple[int, Ending], Captured] = {}
        self._last: tuple[tuple[int, Ending], Captured] | None = None
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, decode: DecodeWork, grants: Grants, sampling: Sampling) -> Replayed | None:
        """Run a step; None where no graph fits it.

        Returns:
            The logits [n, V] float32 of the rows' tokens; or with another ending the tokens [n]
            int64 that they choose, or the log-probabilities of `lines_of`. `last_token` then holds
            the tokens as well.
        """
        slots, rows = self.place.rows.slots, len(decode.row)
        closed = decode.count_full(slots.tokens_per_page)
        at = bisect.bisect_left(self.buckets, rows + closed if slots.landmarks else rows)
        if at == len(self.buckets) or closed > self._closing(self.buckets[at]):
            return None
        bucket = self.buckets[at]
        # Get the graph first: a capture runs on padding and must not read this step's buffers.
        graph = self._graph(bucket, sampling.ending)
        trip = self._send(decode, grants, sampling, bucket)
        output = graph.replay(rows)
        if sampling.ending is not Ending.LOGITS:
            trip.returns(rows)
            return Replayed(output, trip)
        return Replayed(output, trip, self._draws(rows) if sampling.draws else None)

    def answer(self, replayed: Replayed, tokens: Tensor) -> None:
        """Queue the tokens [n] int64 that are chosen from the logits of the step run last to where
        a graph would have put them."""
        rows = self._device[0, : len(tokens)]
        self._lines.answer(tokens, self.place.rows.last_token, rows)
        replayed.trip.returns(len(tokens))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run every graph's kernels once on padding."""
        for bucket in self.buckets:
            for ending in Ending:
                self._run(bucket, ending, True)

    def _graph(self, bucket: int, ending: Ending) -> Captured:
        """The graph of such steps, captured when it is first asked for."""
        key, last = (bucket, ending), self._last
        if last is not None and last[0] == key:
            # Steps are mostly like the one before.
            return last[1]
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        self._last = key, captured
        return captured

    def _closing(self, bucket: int) -> int:
        """Pages that a step of this bucket may complete: each takes two of its slots where the end
        of a page holds no token."""
        return max(1, bucket // 2) if self.place.rows.slots.landmarks else bucket

    def _send(self, decode: DecodeWork, grants: Grants, sampling: Sampling, bucket: int) -> Trip:
        """Queue the step's numbers, and padding behind them, to where the graphs read."""
        if len(grants.cells) > bucket:
            write_cells(self.place.rows.tables, grants)
            grants = NO_GRANTS
        return self._lines.send((decode.row, decode.first, *grants, *(sampling.draws or ())))

    def _step(self, bucket: int) -> tuple[Step, Tensor]:
        """The step as the model reads it, from the memory that stays; and where its tokens lie."""
        place, rows, width = self.place, self.place.rows, _whole(bucket)
        slots, spare = rows.slots, place.spare_locations
        lines = ops.decode_slots(
            self._device[0, :width],
            self._device[1, :width],
            self._device[2, :width],
            self._device[3].view(torch.int32)[:width],
            rows.last_token,
            rows.tables,
            len(spare) > 1,
            slots.page_size,
            rows.page_end_id if slots.landmarks else None,
            spare[0],
            spare[-1] if len(spare) > 1 else 0,
        )
        names = DecodeLines(*lines.unbind())
        closing = self._closing(bucket)
        fields = StepFields(
            names.ids[:bucket],
            names.position[:bucket],
            names.row[:bucket],
            names.slot[:bucket],
            names.completed[:closing],
            names.completed_pages[:closing],
            (names.location[:bucket], names.window_location[:bucket])[: len(spare)],
        )
        batch = fields.batch(rows.page_tables, rows.capacity - 1)
        return place.backends.step(batch, decode_cuts(bucket)), names.last[:bucket]

    def _capture(self, bucket: int, ending: Ending) -> Captured:
        began = time.perf_counter()
        captured = capture(functools.partial(self._run, bucket, ending), self.pool)
        seconds = time.perf_counter() - began
        log.info(
            "captured the decode step of %d slots, %s, in %.2f s", bucket, ending.value, seconds
        )
        return captured

    def _run(self, bucket: int, ending: Ending, rehearsal: bool) -> Tensor:
        count = ROW_LINES if ending is Ending.GREEDY else len(self._device)
        self._lines.fetch(count, _whole(bucket), rehearsal)
        step, last = self._step(bucket)
        hidden = self.model(step)
        logits = self.model.logits(ops.take_rows(hidden, last))
        if ending is Ending.LOGITS:
            return logits
        if ending is Ending.GREEDY:
            tokens: Tensor = ops.argmax_tokens(logits)
        else:
            tokens = ops.draw_tokens(logits, *self._draws(bucket))
        last_token = self.place.rows.last_token
        self._lines.answer(tokens, last_token, self._device[0, :bucket], rehearsal)
        return lines_of(logits, tokens) if ending is Ending.REPORT else tokens

    def _draws(self, count: int) -> list[Tensor]:
        """How the first rows draw, where graphs read it."""
        return [
            line.view(torch.float32)[:count] if name in FLOATS else line[:count]
            for name, line in zip(Draws._fields, self._device[ROW_LINES:], strict=True)
        ]
