"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class FlashAttnTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    programs: int = 264
    """Programs that fill a large device twice; fewer are split over their keys."""
    light_programs: int = 792
    """The same for programs of few lines of wide heads where each has little on its way."""
    narrow: int = 64
    """Widest heads of which three programs of 64 lines share a multiprocessor."""
    max_splits: int = 128
    paired: int = 64
    """Lines of a tile of narrow heads from which on its keys come in pairs of blocks; twice as many
    of wider ones."""
    shared: int = 200 << 10
    """Bytes of a program's memory that the tiles of a launch may take."""
    spare: int = 8 << 10
    wgmma_lines: int = 128
    wgmma_block: int = 64
    wgmma_stages: int = 2
    """Lines of a program, slots of a block in the tables, pairs of blocks of keys and of values
    that are held or on their way."""
    wgmma_full: float = 0.75
    """Share of a device's processors for which there are programs at least: no keys are split."""
    library_queries: int = 256
    """Queries of a call on the CPU, each of which a mask is made for."""


TUNING = FlashAttnTuning()
