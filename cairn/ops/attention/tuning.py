"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass, field

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class AttentionTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    programs: int = 528
    """Programs that fill a large device four times; fewer of them are split over their keys."""
    multiprocessors: int = 132
    """Of a large device."""
    latency: float = 2.4e-6
    """Seconds: memory is read fastest with what it delivers in them on its way. Measured: two
    programs on each multiprocessor of an H100 for heads of 64, one for heads of 128; three and two
    of an H200."""
    light_wave: int = 528
    wide_light_wave: int = 396
    """Programs over all keys where each has little on its way: all that run at once; of narrow
    heads, and of those wider than 64."""
    most_waves: int = 4
    full: float = 0.75
    """Share of their waves that programs fill at least, if they can: one wave as full as this takes
    no longer than several that are full."""
    stages: int = 5
    """Half of them hold keys and values on their way, the others pages."""
    most_splits: int = 128
    tile_waves: tuple[int, int] = (264, 132)
    """Programs of tiles that a large device runs at once; of heads wider than 64."""
    tile_blocks: int = 8
    most_tile_splits: int = 16
    """Fewest blocks of keys that a split of a tile is for, and most splits."""
    block_seconds: float = 1.4e-6
    merge_seconds: float = 4e-6
    merge_rate: float = 8e11
    """What a tile takes for a block of keys on an H100, and a merge by itself and for bytes that
    splits write and it reads. So 128 tokens of 16 heads of 64 take 29 us behind 8K, not 173, and
    1,024 without a past 22, not 40."""
    three_narrow: dict[str, int] = field(default_factory=lambda: {"maxnreg": 168})
    """Launches programs of 4 warps with narrow heads so that three fit the registers of a
    multiprocessor, where keys come in pairs of blocks."""
    merged: int = 2048
    """Elements of the splits' results that a program of `merge` holds: few, for all are loaded at
    once, and nothing else is left to do."""
    paging_block_bytes: int = 8 << 20
    """Budget for one temporary tensor; loops over blocks keep to it whatever the context."""
    tma_least_flops: float = 3e10
    """Operations of a launch from which on tables are worth what the host takes to describe them,
    tens of microseconds: 4,096 tokens on each other with 16 heads of 64."""


TUNING = AttentionTuning()
