"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops import gpu
from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class SelectKTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    min_room: int = 4096
    """Candidates that one program takes at once, at least; half as many again as are chosen, since
    lists hold some more than that."""
    samples: tuple[int, int] = (1 << 10, 1 << 12)
    """Fewest and most scores that are looked at for a bound."""
    part: int = 16
    """One score of so many is, between these."""
    sure: float = 4.0
    """Standard deviations by which a bound is lower than what the sample says."""
    chunk: int = 1 << 10
    """Candidates that one program lists, if the lists of a row are not too many."""
    max_lists: int = 1 << 10
    max_chunk: int = 1 << 14
    """Of a row, but for those that have more of the longest lists: a count of one has 16 bits."""
    line: int = 1 << 7
    """Scores of float32 that a warp loads at once."""
    registers: int = 64
    """Of a thread that lists, and of one that chooses where rows share multiprocessors: more
    programs lie beside each other. Equal scores, which most rows do not have, would take more."""
    mask_rows: int = gpu.MAX_GRID_YZ
    """Rows of one launch, at most."""
    mask_block: int = 2048
    mask_warps: int = 4
    """Elements and warps of a program of `mask_kernel`."""


TUNING = SelectKTuning()
