"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops import gpu
from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class SelectKTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    min_room: int = 4096
    """Least capacity, in candidates, of a program that selects from lists: more than 1.5 k, because
    lists contain more than k candidates."""
    samples: tuple[int, int] = (1 << 10, 1 << 12)
    """Least and most scores that are sampled for a bound."""
    part: int = 16
    """Between these limits one of this many scores is sampled."""
    sure: float = 4.0
    """Safety margin of the sampled bound in standard deviations."""
    chunk: int = 1 << 10
    """Candidates per program that lists, unless a row would have more than `max_lists` lists."""
    max_lists: int = 1 << 10
    max_chunk: int = 1 << 14
    """Most lists per row, and most candidates per list (counts have 16 bits); the longest rows have
    more lists."""
    line: int = 1 << 7
    """Float32 scores that a warp loads per instruction."""
    registers: int = 64
    """Registers per thread of programs that list, and of those that select when several share an
    SM, so that more of them fit. Rows with many equal scores would need more."""
    mask_rows: int = gpu.MAX_GRID_YZ
    """Most rows per launch of `mask_kernel`."""
    mask_block: int = 2048
    mask_warps: int = 4
    """Elements and warps of a program of `mask_kernel`."""


TUNING = SelectKTuning()
