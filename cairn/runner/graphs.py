"""Decode steps as CUDA graphs: one launch for the whole model and the sampler.

A step of few slots is padded to the next bucket; its rows and their lengths are written where the
bucket's graph reads, which is replayed. A graph works slots and locations out from them and the
page table when it runs, never from what they were when it was captured; the tokens that it chooses
stay on the device for the next step and go to the host as well. Buckets are captured when they are
first needed; they share their memory.

A row with guesses runs several tokens, one entry each. Its graph compares what it chooses behind
each entry with the guess in the next one, so that the row's last token is right on the device.
"""

from __future__ import annotations

import bisect
import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.attention.cuts import decode_cuts
from cairn.attention.registry import Backends
from cairn.attention.step import Step
from cairn.runner.buffers import StepFields
from cairn.runner.capture import Captured, capture
from cairn.runner.draft_head import Chains, DraftHead
from cairn.runner.logprobs import lines_of
from cairn.runner.rows import NO_GRANTS, Grants, Rows, write_cells
from cairn.runner.sampler import Draws
from cairn.runner.staging import Lines, Trip
from cairn.runner.step import DecodeWork, Ints

log = logging.getLogger(__name__)

ROW_LINES = 4
"""Lines of a graph's memory that say what runs: the rows, the tokens of each that have run, and
cells of the page tables with the pages that these hold now. What entries are given follows, and how
many guesses are wanted behind each, then the draws."""
MOST_GUESSING = 512
"""Slots of the largest graph of steps with guesses: a GPU is busy with more for longer than the
host takes to queue them."""
NO_NUMBERS: Ints = np.zeros(0, dtype=np.int64)
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
        alone: no other rank runs the same graphs; else rank 0 chooses tokens behind them, and all
            capture the same ones at the same time.
    """

    backends: Backends
    rows: Rows
    spare_pages: tuple[int, ...]
    alone: bool = True

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
        guessing: the step runs guesses.

    The next step overwrites what lies on the device.
    """

    output: Tensor
    trip: Trip
    draws: Sequence[Tensor] | None = None
    guessing: bool = False


class Kind(NamedTuple):
    """What a graph is captured for.

    Attributes:
        slots: of its bucket.
        ending: how it ends.
        guessing: some rows run guesses.
    """

    slots: int
    ending: Ending
    guessing: bool


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
        drafts: guesses of a row at a time.
        head: makes them; None: they are given.

    Attributes:
        buckets: numbers of slots of graphs.
        pool: memory of all graphs of the device.
    """

    def __init__(
        self,
        model: GraphModel,
        place: Place,
        max_rows: int,
        drafts: int = 0,
        head: DraftHead | None = None,
    ) -> None:
        self.model = model
        self.place = place
        self._decoding = buckets_up_to(2 * max_rows)
        guessing = min(MOST_GUESSING, (drafts + 2) * max_rows) if drafts else 0
        self.buckets = buckets_up_to(max(2 * max_rows, guessing))
        self._drafts, self._head = drafts, head
        device = place.rows.device
        # Padding rows have temperature 0: they take their largest logit.
        padding = [len(place.rows.last_token) - 1, 0, place.rows.tables.numel() - 1, 0]
        self._lines = Lines(
            [*padding, -1, 0, *(0 for _ in Draws._fields)],
            _whole(self.buckets[-1]),
            device,
            drafts if head is not None else 0,
        )
        self._device = self._lines.device
        self._captured: dict[Kind, Captured] = {}
        self._last: tuple[Kind, Captured] | None = None
        self._ahead: list[Kind] | None = None
        self.pool = torch.cuda.graph_pool_handle()

    def kinds(self) -> list[Kind]:
        """All that there can be."""
        found = [Kind(n, ending, False) for n in self._decoding for ending in Ending]
        if self._drafts:
            found += [Kind(n, ending, True) for n in self.buckets for ending in Ending]
        return [kind for kind in found if self._ends_in_graph(kind.ending, kind.guessing)]

    def _ends_in_graph(self, ending: Ending, guessing: bool) -> bool:
        """Whether a graph may end so: where guesses follow the tokens, or states wait to be told
        which tokens count, it must choose them itself."""
        chooses = self._head is not None or (guessing and self.place.backends.settles)
        return ending is not Ending.LOGITS or not chooses

    def run(
        self,
        decode: DecodeWork,
        grants: Grants,
        sampling: Sampling,
        given: Ints | None = None,
        ahead: Ints = NO_NUMBERS,
    ) -> Replayed | None:
        """Run a step; None where no graph fits it.

        Args:
            decode: its entries: one of each row, or with `given` several, one behind the other.
            grants: what it changes in the page tables.
            sampling: how the entries choose.
            given: [n], what they run, see `ops.decode_slots`; None: last tokens.
            ahead: with `given` [n], guesses that the draft layer makes behind the row; empty: none.
        Returns:
            The logits [n, V] float32 of the entries' tokens; or with another ending the tokens [n]
            int64 that they choose, or the log-probabilities of `lines_of`. `last_token` then holds
            the tokens as well: of several of a row the last that counts.
        """
        if not self._ends_in_graph(sampling.ending, given is not None):
            return None
        slots, entries = self.place.rows.slots, len(decode.row)
        closed = decode.count_full(slots.tokens_per_page)
        needed = entries + closed if slots.landmarks else entries
        buckets = self._decoding if given is None else self.buckets
        at = bisect.bisect_left(buckets, needed)
        if at == len(buckets) or closed > self._closing(buckets[at]):
            return None
        kind = Kind(buckets[at], sampling.ending, given is not None)
        # Get the graph first: a capture runs on padding and must not read this step's buffers.
        graph = self._graph(kind)
        if len(grants.cells) > kind.slots:
            write_cells(self.place.rows.tables, grants)
            grants = NO_GRANTS
        ids = NO_NUMBERS if given is None else given
        arrays = decode.row, decode.first, *grants, ids, ahead, *(sampling.draws or ())
        trip = self._lines.send(arrays)
        output = graph.replay(entries)
        if sampling.ending is not Ending.LOGITS:
            trip.returns(entries)
            return Replayed(output, trip)
        draws = self._draws(entries) if sampling.draws else None
        return Replayed(output, trip, draws, kind.guessing)

    def answer(self, replayed: Replayed, tokens: Tensor) -> None:
        """Queue a copy of the tokens [n] int64, chosen from the last step's logits, to where graphs
        that choose put theirs."""
        rows, _ = self._ends(tokens, replayed.guessing)
        self._lines.answer(tokens, self.place.rows.last_token, rows)
        replayed.trip.returns(len(tokens))

    def prepare_next(self) -> bool:
        """Capture the next of the kinds that most steps need; False: all are there. The largest are
        first, so that the others reuse their memory."""
        if self._ahead is None:
            endings = (Ending.GREEDY, Ending.DRAW) if self.place.alone else (Ending.LOGITS,)
            ahead = (k for k in self.kinds() if k.ending in endings)
            self._ahead = sorted(ahead, key=lambda kind: kind.slots)
        while self._ahead:
            kind = self._ahead.pop()
            if kind in self._captured:
                continue
            try:
                self._captured[kind] = self._capture(kind)
            except torch.OutOfMemoryError as error:
                if not self.place.alone:
                    raise
                log.warning("no more graphs of decode steps are captured ahead: %s", error)
                self._ahead.clear()
            return bool(self._ahead)
        return False

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the steps of all graphs on padding, without a capture."""
        for kind in self.kinds():
            self._run(kind, True)

    def _graph(self, kind: Kind) -> Captured:
        """The graph of such steps, captured when it is first asked for."""
        last = self._last
        if last is not None and last[0] == kind:
            # Steps are mostly like the one before.
            return last[1]
        captured = self._captured.get(kind)
        if captured is None:
            captured = self._captured[kind] = self._capture(kind)
        self._last = kind, captured
        return captured

    def _closing(self, bucket: int) -> int:
        """Most pages that a step of this bucket completes. With landmarks each takes two slots, the
        last token's and the landmark's."""
        return max(1, bucket // 2) if self.place.rows.slots.landmarks else bucket

    def _step(self, bucket: int, guessing: bool) -> tuple[Step, Tensor]:
        """The step that graphs of this bucket read from fixed buffers, and the index of each row's
        token in it [bucket]."""
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
            self._device[ROW_LINES, :width] if guessing else None,
        )
        names = DecodeLines(*lines.unbind())
        closing = self._closing(bucket)
        fields = StepFields(
            names.ids[:bucket],
            rows.shifted(names.position[:bucket], names.row[:bucket]),
            names.row[:bucket],
            names.slot[:bucket],
            names.completed[:closing],
            names.completed_pages[:closing],
            (names.location[:bucket], names.window_location[:bucket])[: len(spare)],
        )
        batch = fields.batch(rows.page_tables, rows.capacity - 1)
        batch = replace(batch, guesses=self._drafts if guessing else 0)
        return place.backends.step(batch, decode_cuts(bucket)), names.last[:bucket]

    def _capture(self, kind: Kind) -> Captured:
        began = time.perf_counter()
        captured = capture(functools.partial(self._run, kind), self.pool)
        log.info(
            "captured the %s step of %d slots, %s, in %.2f s",
            "verify" if kind.guessing else "decode",
            kind.slots,
            kind.ending.value,
            time.perf_counter() - began,
        )
        return captured

    def _run(self, kind: Kind, rehearsal: bool) -> Tensor:
        bucket, ending, guessing = kind
        count = ROW_LINES + 2 * guessing if ending is Ending.GREEDY else len(self._device)
        self._lines.fetch(count, _whole(bucket), rehearsal)
        step, last = self._step(bucket, guessing)
        hidden = self.model(step)
        states = None if self._head is None else self._head.follow(step, hidden)
        logits = self.model.logits(ops.take_rows(hidden, last))
        if ending is Ending.LOGITS:
            return logits
        if ending is Ending.GREEDY:
            tokens: Tensor = ops.argmax_tokens(logits)
        else:
            tokens = ops.draw_tokens(logits, *self._draws(bucket))
        (rows, counts), guesses = self._ends(tokens, guessing), None
        last_token = self.place.rows.last_token
        if counts is not None and self.place.backends.settles:
            step.settle(torch.zeros_like(last_token).scatter_(0, rows, counts))
        if self._head is not None and states is not None:
            ahead, spare = self._device[ROW_LINES + 1, :bucket], self.place.spare_locations
            chains = Chains(rows, last, tokens, ahead, spare)
            guesses = self._head.chain(step, states, chains, self._drafts if guessing else 0)
        self._lines.answer(tokens, last_token, rows, rehearsal, guesses if guessing else None)
        return lines_of(logits, tokens) if ending is Ending.REPORT else tokens

    def _ends(self, tokens: Tensor, guessing: bool) -> tuple[Tensor, Tensor | None]:
        """The row [n] int64 whose last token each of the tokens [n] is, or the padding row, and how
        many tokens of that row count [n] int64; None: one."""
        rows = self._device[0, : len(tokens)]
        if not guessing:
            return rows, None
        given, padding = self._device[ROW_LINES, : len(tokens)], len(self.place.rows.last_token) - 1
        ends, counts = ops.verify_chains(tokens, given, rows, padding).unbind()
        return ends, counts

    def _draws(self, count: int) -> list[Tensor]:
        """The sampling parameters of the first `count` rows, in the graphs' buffers."""
        return [
            line.view(torch.float32)[:count] if name in FLOATS else line[:count]
            for name, line in zip(Draws._fields, self._device[ROW_LINES + 2 :], strict=True)
        ]
