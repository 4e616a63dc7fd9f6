"""How teams of programs are launched: one kernel, whose programs share out the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.ops import arrivals, gpu
from cairn.ops.early import early_option
from cairn.ops.sampling.kernels.largest import top_k_kernel
from cairn.ops.sampling.kernels.least import min_p_kernel
from cairn.ops.sampling.kernels.nucleus import top_p_kernel

LEAST_PART = 4096
"""Numbers of a part where rows are few."""
WARPS = 4
"""Of a program."""
VECTOR_BYTES = 16
"""What a thread reads at once."""
TOLD = 2048
"""Maxima that the parts of a row tell each other, for a k that is not small."""
OWN, ALL_OWN = 32, 512
"""Numbers of the list that each part makes of its own for a small k, and of all of these where
parts are few."""
TOGETHER = 2048
"""Numbers of the list that all parts of a row make together."""
SLOTS = 128
"""Numbers that a part lists of a nucleus."""
MOST_LISTED = 2048
"""Numbers of a row that a program searches in its registers, if there are many parts."""
BINS = 64
"""Sizes of numbers, half a power of two each."""
ALIGNED = 32
"""Parts begin where so many numbers do: at a line of memory."""
LATE_ROUNDS = 8
"""Programs begin one after the other where each multiprocessor has so many to run."""
MOST_COUNTED = 512
"""Numbers of a line, counted in 10 bits."""
WORKSPACE_BYTES = 64 << 20
"""What programs tell each other is held for so many rows at a time."""


class Kind(NamedTuple):
    """How the programs of a kernel share a multiprocessor: while one waits for the others of its
    team, or for memory, another works.

    Attributes:
        most: numbers of a part where rows are many.
        fill: programs of a multiprocessor before parts get longer.
        lines: that a thread has.
        abreast: programs that have place on a multiprocessor.
        registers: of a thread at most, so that they have.
        late: cycles between the first of them: else all would read, and then all wait.
        early: they are launched before the kernel in front is done, even if not all have a place at
            once.
    """

    most: int
    fill: int
    lines: int
    abreast: int
    registers: int
    late: int
    early: bool


HOLDING = Kind(most=8704, fill=1, lines=1, abreast=4, registers=128, late=5000, early=False)
"""Programs that hold their part in registers."""
READING = Kind(most=8192, fill=2, lines=4, abreast=7, registers=72, late=4000, early=True)
"""Programs that read some of it again. With more of them, what they read again is no longer in the
cache."""


class Team(NamedTuple):
    """How rows are split.

    Attributes:
        kind: of the programs.
        part: numbers of a part.
        parts: of a row.
        align: parts begin where memory is aligned to so many numbers.
        each: numbers that a thread reads at once.
        seated: whether all programs have a place on the device at once.
        late: cycles between the first programs of a multiprocessor.
    """

    kind: Kind
    part: int
    parts: int
    align: int
    each: int
    seated: bool
    late: int = 0

    @property
    def padded(self) -> int:
        """Parts, up to a power of two."""
        return gpu.next_power_of_2(self.parts)

    @property
    def lines(self) -> int:
        """Lines of a tile: as many as threads."""
        return max(32 * WARPS, self.part // MOST_COUNTED)

    @property
    def pieces(self) -> tuple[int, int, int]:
        """PART, PIECE and LINES of kernels that hold parts."""
        return self.part, min(self.part, self.each * self.lines), self.lines

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        """HELD, DEPTH, LINES and EACH of kernels that do not."""
        tile = self.lines * self.each
        held = min(self.kind.lines, self.part // tile)
        return held, self.part // (tile * held), self.lines, self.each


def mask_logits(logits: Tensor, top_k: Tensor) -> Tensor:
    """The top_k [n] largest of logits [n, V] and their equals, the others -inf."""
    return _keep_largest(logits, top_k, shares=False)


def keep_largest(probs: Tensor, top_k: Tensor) -> Tensor:
    """The top_k [n] largest of probs [n, V] and their equals, divided by their sum."""
    return _keep_largest(probs, top_k, shares=True)


def keep_least(probs: Tensor, min_p: Tensor) -> Tensor:
    """Those of probs [n, V] that are at least min_p [n] of the largest, divided by their sum."""
    team = _team(probs, READING)
    memory = (torch.int32, team.parts), (torch.int64, team.parts)
    return _run(min_p_kernel, probs, _out(probs), (min_p,), team, memory, *team.tiles)


def keep_share(
    probs: Tensor, top_p: Tensor, out: Tensor | None = None, settled: Settled | None = None
) -> Tensor:
    """The largest of probs [n, V] up to a mass of top_p [n], divided by their sum.

    Args:
        out: what is written, and returned; None: something new.
        settled: which rows it has already; None: none.
    """
    return _share(probs, _out(probs) if out is None else out, top_p, None, settled)


def draw_share(
    probs: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    out: Tensor | None = None,
    settled: Settled | None = None,
) -> Tensor:
    """One token of the largest of each row of probs [n, V] up to a mass of top_p [n], by uniform
    [n]: [n] int32, -1 where their sum is no number > 0. out, settled: as of `keep_share`."""
    return _share(probs, _tokens(probs) if out is None else out, top_p, uniform, settled)


class Settled(NamedTuple):
    """Which rows are there already.

    Attributes:
        verdicts: [n, 4] int32, the first: not 0 if it is.
        left_open: [1] int32: how many are not.
    """

    verdicts: Tensor
    left_open: Tensor


def _share(
    probs: Tensor, out: Tensor, top_p: Tensor, uniform: Tensor | None, settled: Settled | None
) -> Tensor:
    team = _team(probs, HOLDING)
    slots = min(SLOTS, MOST_LISTED // team.padded)
    memory = (
        *((torch.int32, team.parts), (torch.float64, team.parts), (torch.int32, team.parts, BINS)),
        *((torch.float64, 2, 4, team.parts), (torch.float32, team.parts, slots)),
        *((torch.float64, team.parts), (torch.int32, team.parts)),
    )
    sizes = (*team.pieces, slots, BINS)
    # One number for all rows.
    given = (settled.verdicts, settled.left_open.expand(len(probs))) if settled else (None, None)
    return _run(top_p_kernel, probs, out, (top_p, uniform), team, memory, *sizes, given=given)


def _keep_largest(values: Tensor, top_k: Tensor, *, shares: bool) -> Tensor:
    team = _team(values, READING)
    told = min(team.lines, max(4, TOLD // team.padded))
    own = max(OWN, ALL_OWN // team.padded)
    memory = (
        *((torch.int32, told * team.parts), (torch.float32, own * team.parts + TOGETHER)),
        (torch.int64, 2, team.parts),
    )
    sizes = (*team.tiles, told, own, TOGETHER, shares)
    return _run(top_k_kernel, values, _out(values), (top_k,), team, memory, *sizes)


def _run(
    kernel: Any,
    values: Tensor,
    out: Tensor,
    parameters: Sequence[Tensor | None],
    team: Team,
    memory: Sequence[tuple[Any, ...]],
    *sizes: int,
    given: Sequence[Tensor | None] = (),
) -> Tensor:
    """out [n, ..], as a kernel makes it of values [n, V] and parameters of each row [n].

    Args:
        memory: dtypes and shapes [n, ..] of what the kernel writes for itself.
        sizes: its own constants.
        given: [n, ..], what else it reads of each row.
    """
    step = _most_rows(memory)
    for begin in range(0, len(values), step):
        at = slice(begin, begin + step)
        x = values[at]
        programs = team.parts * len(x)
        counters = arrivals.counters(len(x) + 1, x.device)
        early = (team.seated or team.kind.early) and gpu.launches_early(x.device)
        kernel[(programs,)](
            *(x, *(None if p is None else p[at] for p in parameters), out[at]),
            *(None if team.seated else counters[-1], counters),
            *(_memory(x, *shape, dtype=dtype) for dtype, *shape in memory),
            *(None if p is None else p[at] for p in given),
            *(values.stride(0), values.shape[1], programs, team.parts),
            *(gpu.processors(x.device), team.padded, *sizes),
            *(arrivals.APART, team.align, team.late, team.kind.abreast, early),
            num_warps=WARPS,
            maxnreg=team.kind.registers,
            **early_option(early),
        )
    return out


def _most_rows(memory: Sequence[tuple[Any, ...]]) -> int:
    """As many rows as there is a workspace for; the next ones begin where memory is aligned."""
    row: int = sum(dtype.itemsize * math.prod(shape) for dtype, *shape in memory)
    return max(ALIGNED, WORKSPACE_BYTES // row // ALIGNED * ALIGNED)


def _team(values: Tensor, kind: Kind) -> Team:
    """Parts as small as keep all of the device busy, and no more of a row than have a place at
    once; the interpreter runs one program after the other, none of which can wait."""
    rows, width = values.shape
    # Rows that lie as far behind an aligned address in memory as in the result.
    align = ALIGNED if rows <= 1 else math.gcd(ALIGNED, values.stride(0) - width)
    places = gpu.processors(values.device)
    # Parts of a row begin up to so many numbers in front of it.
    width += 0 if width % ALIGNED == 0 else align - 1
    each = VECTOR_BYTES // values.element_size()
    step = each * 32 * WARPS * kind.lines
    least = gpu.next_power_of_2(-(-width * max(1, rows) // (places * kind.fill)))
    part = max(min(max(least, LEAST_PART), kind.most), gpu.next_power_of_2(-(-width // places)))
    parts = 1 if gpu.INTERPRETED else -(-width // part)
    part = -(-width // (parts * step)) * step
    if part > kind.most:
        part = gpu.next_power_of_2(part)
    late = kind.late if parts * rows >= LATE_ROUNDS * places and not gpu.INTERPRETED else 0
    return Team(kind, part, parts, align, each, parts * rows <= places, late)


def _out(values: Tensor) -> Tensor:
    return gpu.empty(values.shape, values.dtype, values.device)


def _tokens(values: Tensor) -> Tensor:
    return gpu.empty(values.shape[:1], torch.int32, values.device)


def _memory(values: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """[n, *shape], not written."""
    return gpu.empty((values.shape[0], *shape), dtype, values.device)
