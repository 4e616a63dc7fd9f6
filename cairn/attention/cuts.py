"""Division of a step's slots into parts, each of which is one call of an attention op.

Rows that decode are attended one by one, chunks in tiles. Slots near the starts of rows, where
landmark layers select every page, are parts of their own (*fronts*). On a GPU kernels are compiled
and graphs captured for each way of cutting, so there are few.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.attention.batch import Batch, StepRows
from cairn.ops import planning

CHUNK = 16
"""A step whose rows have at least this many slots on average is run in tiles."""
ALONE = (16, 64, 256)
"""Numbers of first slots of a step that may be attended one by one, besides multiples of the
last."""
MIN_EARLY = 256
"""With fewer slots in the first front than this, they are attended together with the other
slots."""
ROUND = 16
"""Slots of a front are a multiple of it: kernels are compiled for addresses as aligned as those of
a whole step."""
UNCHUNKED = 256
"""Slots of the largest graph that is also captured for steps whose slots are no chunks."""


class Front(NamedTuple):
    """Consecutive slots of a step that are among the first pages of their rows.

    Attributes:
        slots: number of slots; as a limit, first slots of a row: a multiple of ROUND.
        pages: pages of a row.
    """

    slots: int
    pages: int


class Cuts(NamedTuple):
    """One way to cut the slots of a step.

    Attributes:
        chunked: slots come in chunks of rows, dozens side by side, not each of another row.
        alone: how many of the first slots are attended one by one. They are mostly of rows that
            decode: a tile is computed once for each row in it.
        fronts: of the next slots, those in the first of the fronts' limits, then of the next.
    """

    chunked: bool
    alone: int = 0
    fronts: tuple[Front, ...] = ()


WHOLE = Cuts(False)
"""No division."""


def alone(rows: int, slots: int) -> int:
    """Number of a step's first slots that are attended one by one if `rows` rows decode in front of
    chunks: those of the rows, rounded up with slots of the chunks."""
    if not rows:
        return 0
    whole = -(-rows // ALONE[-1]) * ALONE[-1]
    return min(slots, next((n for n in ALONE if n >= rows), whole))


@functools.cache
def fewest_rows(apart: int, slots: int) -> int:
    """Fewest decoding rows for which `alone` gives `apart` slots."""
    return next(rows for rows in range(apart + 1) if alone(rows, slots) == apart)


def decode_cuts(slots: int) -> Cuts:
    """The cuts of a step in which every row decodes."""
    return Cuts(False, slots)


class Cutter:
    """Chooses the cuts of steps.

    Args:
        limits: the fronts of a row, ascending; see `Front`.
    """

    def __init__(self, limits: Sequence[Front]) -> None:
        self.limits = tuple(limits)

    def of_step(self, rows: StepRows) -> Cuts:
        """For a step that runs operation by operation."""
        slots = len(rows.slot)
        chunked = _chunked(rows)
        only_decodes = rows.decoding == len(rows.row)
        apart = slots if only_decodes else alone(rows.decoding, slots)
        return Cuts(chunked, apart, self._fronts(rows, apart))

    def of_bucket(self, rows: StepRows, bucket: int) -> Cuts:
        """For a step that is padded to `bucket` slots and runs as a graph."""
        if not (_chunked(rows) or bucket > UNCHUNKED):
            return WHOLE
        apart = alone(rows.decoding, bucket)
        held = (f for f in self._choices(bucket, apart) if self._within(rows, apart, f))
        best = max(held, key=lambda fronts: [(front.slots, -front.pages) for front in fronts])
        return Cuts(True, apart, best)

    def all_of_bucket(self, bucket: int, num_rows: int) -> list[Cuts]:
        """All results of `of_bucket` for steps of up to `num_rows` rows."""
        # A step of few slots is run in tiles only if they belong to few rows.
        most = num_rows if bucket > UNCHUNKED else min(num_rows, bucket // CHUNK)
        parts = sorted({alone(decoding, bucket) for decoding in range(most)})
        return [
            Cuts(True, apart, fronts) for apart in parts for fronts in self._choices(bucket, apart)
        ]

    def _fronts(self, rows: StepRows, begin: int) -> tuple[Front, ...]:
        """Fronts of the slots from `begin` on that are large enough to be parts of their own."""
        found = []
        for number, limit in enumerate(self.limits):
            late = rows.slot[begin:] >= limit.slots
            count = int(late.argmax()) // ROUND * ROUND if late.any() else len(late)
            if count == len(late) > 0 or (number == 0 and count >= MIN_EARLY):
                found.append(Front(count, limit.pages))
                begin += count
        return tuple(found)

    def _choices(self, bucket: int, apart: int) -> list[tuple[Front, ...]]:
        """The fronts that a graph of `bucket` slots may have behind its first `apart`: none, those
        of one row from its start on, or the first front for all slots. Slots of `apart` beyond the
        decoding rows are the first ones of that row."""
        slots, past = bucket - apart, apart - fewest_rows(apart, bucket)
        found: list[tuple[Front, ...]] = [()]
        if self.limits and slots:
            found.append((Front(slots, self.limits[0].pages),))
        row: list[Front] = []
        for number, limit in enumerate(self.limits):
            count = min(slots, (limit.slots - past) // ROUND * ROUND)
            if 0 < count == slots or (number == 0 and count >= MIN_EARLY):
                row.append(Front(count, limit.pages))
                slots, past = slots - count, past + count
        return sorted({*found, tuple(row)})

    def _within(self, rows: StepRows, begin: int, fronts: Sequence[Front]) -> bool:
        """Whether the slots from `begin` on, and padding behind them, lie in `fronts`."""
        most = {limit.pages: limit.slots for limit in self.limits}
        for count, pages in fronts:
            if (rows.slot[begin : begin + count] >= most[pages]).any():
                return False
            begin += count
        return True


def _chunked(rows: StepRows) -> bool:
    return len(rows.slot) >= CHUNK * len(rows.row)


@dataclass(frozen=True, slots=True)
class Part:
    """Slots of a step that one call of an op processes.

    Attributes:
        at: their indices; None: all.
        row, slot: [n] of these.
        segments: see `StepRows`; None: not known on the host.
        chunked: see `Cuts`.
        pages: the slots are within this many first pages of their rows; None: anywhere.
    """

    at: slice | None
    row: Tensor
    slot: Tensor
    segments: list[int] | None
    chunked: bool
    pages: int | None

    def of(self, lines: Tensor) -> Tensor:
        """Those of [T, ..]."""
        return lines if self.at is None else lines[self.at]


def attend_in_parts(
    batch: Batch,
    cuts: Cuts,
    segments: list[int] | None,
    attend: Callable[[Part], Tensor],
    *,
    tiled: bool,
    by_fronts: bool = False,
) -> Tensor:
    """The results of `attend` for the step's slots [T, ...]: all at once, or part by part.

    Args:
        tiled: the op would cut the slots into tiles; else they are one part.
        by_fronts: fronts are separate parts.
    """
    total, fronts = len(batch.slot), cuts.fronts if by_fronts else ()
    starts = [*itertools.accumulate((front.slots for front in fronts), initial=cuts.alone)]
    bounds = [*range(0, cuts.alone, planning.SPLIT_TOKENS), *starts, total]
    pieces = [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]
    if not tiled or len(pieces) == 1 or batch.watch is not None:
        whole = [front.pages for front in fronts if front.slots == total]
        pages = whole[0] if whole else None
        return attend(Part(None, batch.row, batch.slot, segments, cuts.chunked, pages))
    pages_at = {start: front.pages for start, front in zip(starts, fronts, strict=False)}
    done = []
    for at in pieces:
        own = None if segments is None else _segments_in(segments, at)
        chunked = cuts.chunked and at.start >= cuts.alone
        part = Part(at, batch.row[at], batch.slot[at], own, chunked, pages_at.get(at.start))
        done.append(attend(part))
    return torch.cat(done)


def _segments_in(segments: list[int], at: slice) -> list[int]:
    """Those of the slots `at` of a step."""
    found, begin = [], 0
    for row, first, count in zip(*(iter(segments),) * 3, strict=True):
        low, high = max(begin, at.start), min(begin + count, at.stop)
        if low < high:
            found += [row, first + low - begin, high - low]
        begin += count
    return found
