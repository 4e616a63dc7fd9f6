"""Decode steps as CUDA graphs: one launch for the whole model and the sampler.

A step of few slots is padded to the next bucket; its rows and their lengths are written to the
input buffers of the bucket's graph, which is replayed. The graph computes slots and locations from
them and the page table when it runs, never from values at capture; the tokens that it chooses stay
on the device for the next step and go to the host as well. Buckets are captured when they are first
needed; they share their memory.

A row with guesses runs several tokens, one entry each. The graph compares the token that it chooses
after each entry with the guess in the next entry, so that the row's last token is known on the
device.
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
from cairn.distributed.groups import ALONE, Group
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
"""Leading lines of a graph's input: the rows, the number of tokens that each has run, and changed
cells of the page tables with their new pages. They are followed by the given tokens of the entries,
the number of guesses wanted after each, and the sampling parameters."""
MAX_GUESSING = 512
"""Slots of the largest graph of steps with guesses: larger steps keep a GPU busy for longer than
the host needs to launch them."""
NO_NUMBERS: Ints = np.zeros(0, dtype=np.int64)
FLOATS = ("temperature", "top_p", "min_p")


class GraphModel(Protocol):
    """The part of a model that graphs capture."""

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
    """How the rows of a step sample their tokens.

    Attributes:
        ending: what the graph does with the logits.
        draws: their sampling parameters, in the graph or behind it; None (not with reported
            log-probabilities): all rows are greedy.
    """

    ending: Ending
    draws: Draws | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Buffers, page tables and backends that graphs use.

    Attributes:
        backends: of the model's layers.
        rows: page tables and last tokens; their addresses stay.
        spare_pages: by page group, a spare page, to which padding writes.
        group: ranks that capture and run the same graphs at the same time; with several, rank 0
            samples outside of the graphs.
    """

    backends: Backends
    rows: Rows
    spare_pages: tuple[int, ...]
    group: Group = ALONE

    @property
    def spare_locations(self) -> tuple[int, ...]:
        """By page group, a slot of the spare page, to which padding is written."""
        size = self.rows.slots.page_size
        return tuple(page * size for page in self.spare_pages)


class Replayed(NamedTuple):
    """A step that was launched as a graph.

    Attributes:
        output: the graph's output for the rows that run.
        trip: returns the step's tokens; if they are sampled from logits, after `answer` was called.
        draws: sampling parameters on the device, if the output is logits; else None.
        guessing: whether the step runs guesses.

    The next step overwrites the device tensors.
    """

    output: Tensor
    trip: Trip
    draws: Sequence[Tensor] | None = None
    guessing: bool = False


class Kind(NamedTuple):
    """The key of a graph.

    Attributes:
        slots: slots of its bucket.
        ending: how it ends.
        guessing: whether rows may run guesses.
    """

    slots: int
    ending: Ending
    guessing: bool


class DecodeLines(NamedTuple):
    """Outputs of `ops.decode_slots`, [W] each: a step's fields, and the index of each row's token
    among the slots."""

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
    """Bucket sizes (slots) of graphs, the last one >= most."""
    found = [1, 2, 4, 8]
    while found[-1] < most:
        found.append(found[-1] + max(8, found[-1] // 4 // 8 * 8))
    return tuple(n for i, n in enumerate(found) if i == 0 or found[i - 1] < most)


def _whole(bucket: int) -> int:
    """Elements in a bucket's lines, a multiple of 16: kernels are specialised on divisibility by
    16."""
    return -(-bucket // 16) * 16


class DecodeGraphs:
    """Graphs of decode steps on one device.

    Args:
        model: runs the steps.
        place: where.
        max_rows: requests that run at once; each takes a slot in a step, and one more for a
            landmark.
        drafts: guesses of a row at a time.
        head: the draft layer that makes them; None: they are given.

    Attributes:
        buckets: bucket sizes in slots.
        pool: memory pool of all graphs of the device.
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
        guessing = min(MAX_GUESSING, (drafts + 2) * max_rows) if drafts else 0
        self.buckets = buckets_up_to(max(2 * max_rows, guessing))
        self._drafts, self._head = drafts, head
        device = place.rows.device
        # Padding rows have temperature 0 (argmax).
        padding = [len(place.rows.last_token) - 1, 0, place.rows.tables.numel() - 1, 0]
        self._lines = Lines(
            [*padding, -1, 0, *(0 for _ in Draws._fields)],
            _whole(self.buckets[-1]),
            device,
            drafts if head is not None else 0,
        )
        self._device = self._lines.device
        self._captured: dict[Kind, Captured] = {}
        self._too_large: set[Kind] = set()
        self._last: tuple[Kind, Captured] | None = None
        self._ahead: list[Kind] | None = None
        self.pool = torch.cuda.graph_pool_handle()

    def kinds(self) -> list[Kind]:
        """All possible kinds."""
        found = [Kind(n, ending, False) for n in self._decoding for ending in Ending]
        if self._drafts:
            found += [Kind(n, ending, True) for n in self.buckets for ending in Ending]
        return [kind for kind in found if self._ends_in_graph(kind.ending, kind.guessing)]

    def _ends_in_graph(self, ending: Ending, guessing: bool) -> bool:
        """Whether a graph may have this ending: if guesses are made after the tokens, or states are
        advanced by accepted tokens, the graph must sample itself."""
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
            decode: its entries: one per row or, with `given`, several consecutive ones.
            grants: changes of the page tables.
            sampling: how the entries sample.
            given: [n], the tokens that they run, see `ops.decode_slots`; None: last tokens.
            ahead: with `given` [n], number of guesses that the draft layer makes after the row;
                empty: none.
        Returns:
            The logits [n, V] float32 of the entries' tokens; or with another ending the tokens [n]
            int64 that they choose, or the log-probabilities of `lines_of`. The tokens are
            also written to `last_token`: for a row with several entries, its last accepted token.
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
        if graph is None:
            return None
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
        """Queue a copy of the tokens [n] int64, sampled from the last step's logits, to the place
        where sampling graphs write theirs."""
        rows, _ = self._ends(tokens, replayed.guessing)
        self._lines.answer(tokens, self.place.rows.last_token, rows)
        replayed.trip.returns(len(tokens))

    def prepare_next(self) -> bool:
        """Capture the next missing graph of the most frequent kinds; False: none is missing. The
        largest are first, so that the others reuse their memory."""
        if self._ahead is None:
            endings = (Ending.GREEDY, Ending.DRAW) if self.place.group.alone else (Ending.LOGITS,)
            ahead = (k for k in self.kinds() if k.ending in endings)
            self._ahead = sorted(ahead, key=lambda kind: kind.slots)
        while self._ahead:
            kind = self._ahead.pop()
            if kind in self._captured or kind in self._too_large:
                continue
            if self._prepare(kind) is None:
                self._ahead.clear()
            return bool(self._ahead)
        return False

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the steps of all graphs on padding, without a capture."""
        for kind in self.kinds():
            self._run(kind, True)

    def _graph(self, kind: Kind) -> Captured | None:
        """The graph of a kind, captured at first use; None: there is no memory for it."""
        last = self._last
        if last is not None and last[0] == kind:
            # Most steps have the kind of the previous one.
            return last[1]
        captured = self._captured.get(kind)
        if captured is None and kind not in self._too_large:
            captured = self._prepare(kind)
        if captured is not None:
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

    def _prepare(self, kind: Kind) -> Captured | None:
        """Capture a graph; None, and such steps run without one, where there is no memory."""
        began = time.perf_counter()
        try:
            captured = capture(functools.partial(self._run, kind), self.pool, self.place.group)
        except torch.OutOfMemoryError as error:
            self._too_large.add(kind)
            log.warning("decode steps of %d slots run without a graph: %s", kind.slots, error)
            return None
        self._captured[kind] = captured
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
