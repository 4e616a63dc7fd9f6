"""How teams of programs are launched: one kernel, whose programs hold the rows in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.ops import arrivals, gpu
from cairn.ops.sampling.kernels.largest import top_k_kernel
from cairn.ops.sampling.kernels.least import min_p_kernel
from cairn.ops.sampling.kernels.nucleus import top_p_kernel

LEAST_PART, MOST_PART = 4096, 8704
"""Numbers of a part where rows are few, and where they are many."""
WARPS = 4
"""Of a program."""
PIECE = 4
"""Numbers of a line that a program works on at a time."""
REGISTERS = 128
"""Of a thread at most: so four programs find place on a multiprocessor, and one waits for the
others of its team, or for memory, while another works."""
NEAR = 64
"""Up to such a k a part lists what may be among the largest of the row, without asking others."""
SLOTS = 128
"""Numbers that a part lists: there are seldom more than 88 for a k up to NEAR."""
MOST_LISTED = 2048
"""Numbers of a row that a program searches in its registers, if there are many parts."""
BINS = 64
"""Sizes of numbers, half a power of two each."""
ALIGNED = 32
"""Parts begin where so many numbers do: at a line of memory."""
LATE, LATE_ROUNDS = 5000, 8
"""Cycles between the first programs of a multiprocessor, where each has so many to run."""
BITS = 24
"""Numbers of which a word tells which are listed: as many bits as float32 sums up."""
MOST_COUNTED = 512
"""Numbers of a line, counted in 10 bits."""
WORKSPACE_BYTES = 64 << 20
"""Lists are held for so many rows at a time."""


class Team(NamedTuple):
    """How rows are split.

    Attributes:
        part: numbers of a part.
        parts: of a row.
        align: parts begin where memory is aligned to so many numbers.
        seated: whether all programs have a place on the device at once.
        late: cycles between the first programs of a multiprocessor.
    """

    part: int
    parts: int
    align: int
    seated: bool
    late: int = 0

    @property
    def padded(self) -> int:
        """Parts, up to a power of two."""
        return gpu.next_power_of_2(self.parts)

    @property
    def lines(self) -> int:
        """Lines of a part: as many as threads."""
        return max(32 * WARPS, self.part // MOST_COUNTED)

    @property
    def piece(self) -> int:
        """Numbers of a part that programs work on at a time."""
        return min(self.part, PIECE * self.lines)

    @property
    def most_rows(self) -> int:
        """As many rows as lists are held for at a time."""
        rows = WORKSPACE_BYTES // (4 * SLOTS * self.parts)
        # The next ones begin where memory is aligned.
        return max(ALIGNED, rows // ALIGNED * ALIGNED)


def mask_logits(logits: Tensor, top_k: Tensor) -> Tensor:
    """The top_k [n] largest of logits [n, V] and their equals, the others -inf."""
    return _keep_largest(logits, top_k, shares=False)


def keep_largest(probs: Tensor, top_k: Tensor) -> Tensor:
    """The top_k [n] largest of probs [n, V] and their equals, divided by their sum."""
    return _keep_largest(probs, top_k, shares=True)


def keep_least(probs: Tensor, min_p: Tensor) -> Tensor:
    """Those of probs [n, V] that are at least min_p [n] of the largest, divided by their sum."""
    team = _team(probs)
    memory = (torch.int32, team.parts), (torch.int64, team.parts)
    return _run(min_p_kernel, probs, _out(probs), (min_p,), team, memory)


def keep_share(probs: Tensor, top_p: Tensor) -> Tensor:
    """The largest of probs [n, V] up to a mass of top_p [n], divided by their sum."""
    return _share(probs, _out(probs), top_p, None)


def draw_share(probs: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token of the largest of each row of probs [n, V] up to a mass of top_p [n], by uniform
    [n]: [n] int32, -1 where their sum is no number > 0."""
    return _share(probs, _tokens(probs), top_p, uniform)


def _share(probs: Tensor, out: Tensor, top_p: Tensor, uniform: Tensor | None) -> Tensor:
    team = _team(probs)
    slots = min(SLOTS, MOST_LISTED // team.padded)
    memory = (
        *((torch.int32, team.parts), (torch.float64, team.parts), (torch.int32, team.parts, BINS)),
        *((torch.float64, 2, 4, team.parts), (torch.float32, team.parts, slots)),
        *((torch.float64, team.parts), (torch.int32, team.parts)),
    )
    return _run(top_p_kernel, probs, out, (top_p, uniform), team, memory, slots, BINS, BITS)


def _keep_largest(values: Tensor, top_k: Tensor, *, shares: bool) -> Tensor:
    team = _team(values)
    memory = (
        *((torch.int32, 4, team.parts), (torch.float32, team.parts, SLOTS)),
        (torch.int64, 2, team.parts),
    )
    return _run(top_k_kernel, values, _out(values), (top_k,), team, memory, NEAR, SLOTS, shares)


def _run(
    kernel: Any,
    values: Tensor,
    out: Tensor,
    parameters: Sequence[Tensor | None],
    team: Team,
    memory: Sequence[tuple[Any, ...]],
    *sizes: int,
) -> Tensor:
    """out [n, ..], as a kernel makes it of values [n, V] and parameters of each row [n].

    Args:
        memory: dtypes and shapes [n, ..] of what the kernel writes for itself.
        sizes: its own constants.
    """
    for begin in range(0, len(values), team.most_rows):
        at = slice(begin, begin + team.most_rows)
        x = values[at]
        programs = team.parts * len(x)
        kernel[(programs,)](
            *(x, *(None if p is None else p[at] for p in parameters), out[at]),
            *_counters(x, team),
            *(_memory(x, *shape, dtype=dtype) for dtype, *shape in memory),
            *(values.stride(0), values.shape[1], programs, team.parts),
            *(gpu.processors(x.device), team.padded, team.part, team.piece, team.lines),
            *(*sizes, arrivals.APART, team.align, team.late),
            num_warps=WARPS,
            maxnreg=REGISTERS,
        )
    return out


def _team(values: Tensor) -> Team:
    """Parts as small as keep all of the device busy, and no more of a row than have a place at
    once; the interpreter runs one program after the other, none of which can wait."""
    rows, width = values.shape
    # Rows that lie as far behind an aligned address in memory as in the result.
    align = ALIGNED if rows <= 1 else math.gcd(ALIGNED, values.stride(0) - width)
    places = gpu.processors(values.device)
    # Parts of a row begin up to so many numbers in front of it.
    width += 0 if width % ALIGNED == 0 else align - 1
    piece = PIECE * 32 * WARPS
    least = gpu.next_power_of_2(-(-width * max(1, rows) // places))
    part = max(min(max(least, LEAST_PART), MOST_PART), gpu.next_power_of_2(-(-width // places)))
    parts = 1 if gpu.INTERPRETED else -(-width // part)
    part = -(-width // (parts * piece)) * piece
    if part > MOST_PART:
        part = gpu.next_power_of_2(part)
    late = LATE if parts * rows >= LATE_ROUNDS * places else 0
    return Team(part, parts, align, parts * rows <= places, late)


def _out(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device=values.device)


def _tokens(values: Tensor) -> Tensor:
    return values.new_empty(values.shape[:1], dtype=torch.int32)


def _memory(values: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """[n, *shape], not written."""
    return values.new_empty((values.shape[0], *shape), dtype=dtype)


def _counters(values: Tensor, team: Team) -> tuple[Tensor | None, Tensor | None]:
    """The tickets of a launch, and each row's arrivals; None where they are not needed."""
    if team.parts == 1:
        return None, None
    counters = arrivals.counters(len(values) + 1, values.device)
    return None if team.seated else counters[-1], counters
