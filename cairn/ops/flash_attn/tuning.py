"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class FlashAttnTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    programs: int = 264
    """Two waves of programs on a large device; with fewer programs, keys are split."""
    light_programs: int = 792
    """The same for programs with few lines of wide heads, which have few bytes in flight each."""
    narrow: int = 64
    """Widest heads for which three programs of 64 lines fit on an SM."""
    max_splits: int = 128
    paired: int = 64
    """Least lines of a tile for which keys are loaded in pairs of blocks, for narrow heads; twice
    as many for wider ones."""
    shared: int = 200 << 10
    """Most bytes of shared memory for the tiles of a program."""
    spare: int = 8 << 10
    wgmma_lines: int = 128
    wgmma_block: int = 64
    wgmma_stages: int = 2
    """Lines per program, slots per TMA block, and stages (pairs of key and value blocks)."""
    wgmma_full: float = 0.75
    """Least fraction of SMs with a program; keys are not split."""
    library_queries: int = 256
    """Queries per call of SDPA on the CPU, which limits the size of the mask."""


TUNING = FlashAttnTuning()
