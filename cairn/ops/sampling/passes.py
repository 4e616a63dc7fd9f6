"""How the nucleus of rows is found by passes over them, where rows are many: see `kernels.passes`.

A team reads a row once, but its programs wait for each other; passes read rows twice where results
are stored, and once where tokens are drawn, and none waits. Rows that a pass leaves open, because
it was guessed wrong where their nucleus ends, or too many of their numbers are equal, a team takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.early import early_option
from cairn.ops.sampling import teams
from cairn.ops.sampling.kernels.guess import guess_kernel
from cairn.ops.sampling.kernels.passes import list_kernel, settle_kernel, store_kernel

BLOCK = 4096
"""Numbers that a program reads at once."""
WARPS = 4
"""Of a program that reads a part."""
MOST_PARTS = 32
"""Parts of a row at most."""
LISTED, SLOTS = 4096, 512
"""Numbers that all parts of a row list, and a part, at most."""
ALIGNED = 4
"""Numbers that are read at once."""
FILLED = 0.55
"""Which part of the lists is to be filled: a row with too many numbers for them is left open."""
SOME, RUN, BINS = 4096, 16, 256
"""Numbers of a row from which it is guessed where its nucleus ends, how many of them lie side by
side, and the bins in which they are counted, a quarter of a power of two each."""
ROW_WARPS, ROW_REGISTERS = 8, 128
"""Of a program for a row, and registers of its threads at most: two such programs have place on a
multiprocessor."""
FEW_ROWS, FEW_DRAWS = 8, 1
"""Rows with which a team is not slower, where they are stored and where tokens are drawn."""
MOST_ROWS = 512
"""Rows at a time: so many keep a device busy, and more take more memory."""
MOST_PART = 4 * BLOCK
"""Numbers of a part at most: the program that stores it holds them in registers."""


def keep_share(probs: Tensor, top_p: Tensor) -> Tensor:
    """`teams.keep_share`, by passes if there are so many rows that it is sooner done."""
    if len(probs) <= FEW_ROWS or _too_wide(probs):
        return teams.keep_share(probs, top_p)
    out = gpu.empty(probs.shape, probs.dtype, probs.device)
    for begin in range(0, len(probs), MOST_ROWS):
        at = slice(begin, begin + MOST_ROWS)
        _pass(probs[at], top_p[at], None, out[at])
    return out


def draw_share(probs: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """`teams.draw_share`, by passes unless rows are few."""
    if len(probs) <= FEW_DRAWS or _too_wide(probs):
        return teams.draw_share(probs, top_p, uniform)
    out = gpu.empty(probs.shape[:1], torch.int32, probs.device)
    for begin in range(0, len(probs), MOST_ROWS):
        at = slice(begin, begin + MOST_ROWS)
        _pass(probs[at], top_p[at], uniform[at], out[at])
    return out


class Split(NamedTuple):
    """How rows are split.

    Attributes:
        align: parts begin where memory is aligned to so many numbers.
        part: numbers of a part.
        parts: of a row.
        slots: numbers that a part lists.
    """

    align: int
    part: int
    parts: int
    slots: int


def split(probs: Tensor) -> Split:
    """Parts of a block, or of more if there were more than MOST_PARTS of them."""
    rows, width = probs.shape
    # Rows that lie as far behind an aligned address in memory as in the result.
    align = teams.ALIGNED if rows <= 1 else math.gcd(teams.ALIGNED, probs.stride(0) - width)
    # Parts of a row begin up to so many numbers in front of it.
    longest = width + (0 if width % teams.ALIGNED == 0 else align - 1)
    part = BLOCK * gpu.next_power_of_2(-(-longest // (BLOCK * MOST_PARTS)))
    parts = -(-longest // part)
    # Lists begin where memory is aligned.
    return Split(align, part, parts, min(SLOTS, LISTED // parts // ALIGNED * ALIGNED))


def _too_wide(probs: Tensor) -> bool:
    return probs.shape[1] + teams.ALIGNED > MOST_PARTS * MOST_PART


def _pass(probs: Tensor, top_p: Tensor, uniform: Tensor | None, out: Tensor) -> None:
    (rows, width), stride = probs.shape, probs.stride(0)
    align, part, parts, slots = split(probs)

    def memory(dtype: torch.dtype, *shape: int) -> Tensor:
        return gpu.empty(shape, dtype, probs.device)

    bounds, left_open = memory(torch.int32, rows, 2), memory(torch.int32, 1)
    peaks, counts, firsts = (memory(torch.int32, rows, parts) for _ in range(3))
    aboves, amongs = (memory(torch.float64, rows, parts) for _ in range(2))
    numbers, verdicts = memory(torch.float32, rows, parts, slots), memory(torch.int32, rows, 4)
    early = gpu.launches_early(probs.device)
    option, lines = early_option(early), 32 * WARPS
    guess_kernel[(rows,)](
        *(probs, top_p, bounds, left_open, stride, width, slots * parts * FILLED),
        *(SOME, RUN, BINS, align, early),
        num_warps=ROW_WARPS,
        **option,
    )
    list_kernel[(rows * parts,)](
        *(probs, bounds, peaks, aboves, amongs, counts, numbers, stride, width, parts),
        *(part, BLOCK, lines, slots, align, early),
        num_warps=WARPS,
        **option,
    )
    row_lines = 32 * ROW_WARPS
    settle_kernel[(rows,)](
        *(probs, top_p, uniform, out, bounds, peaks, aboves, amongs, counts, numbers, firsts),
        *(verdicts, left_open, stride, width, parts, gpu.next_power_of_2(parts)),
        *(part, min(part, 4 * row_lines), row_lines),
        *(slots, gpu.next_power_of_2(parts * slots), align, early),
        num_warps=ROW_WARPS,
        maxnreg=ROW_REGISTERS,
        **option,
    )
    settled = teams.Settled(verdicts, left_open)
    if uniform is not None:
        teams.draw_share(probs, top_p, uniform, out, settled)
        return
    store_kernel[(rows * parts,)](
        *(probs, out, firsts, verdicts, stride, width, parts, rows * parts),
        *(part, 4 * lines, align, early),
        num_warps=WARPS,
        **option,
    )
    teams.keep_share(probs, top_p, out, settled)
