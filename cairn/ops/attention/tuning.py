"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass, field

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class AttentionTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    programs: int = 528
    """Programs that fill a large device four times; with fewer, keys are split."""
    multiprocessors: int = 132
    """Multiprocessors of a large device."""
    latency: float = 2.4e-6
    """Seconds of memory bandwidth that must be in flight to read memory fastest. Measured: two
    programs on each multiprocessor of an H100 for heads of 64, one for heads of 128; three and two
    of an H200."""
    light_wave: int = 528
    wide_light_wave: int = 396
    """Programs per wave if each has few bytes in flight: all that run at once, for narrow heads and
    for heads wider than 64."""
    max_waves: int = 4
    full: float = 0.75
    """Least utilisation of waves, where possible: one wave this full takes no longer than several
    full ones."""
    stages: int = 5
    """Pipeline stages; half of them hold keys and values in flight, the others page ids."""
    max_splits: int = 128
    tile_waves: tuple[int, int] = (264, 132)
    """Tile programs that run concurrently on a large device, for heads up to 64 and for wider
    ones."""
    tile_blocks: int = 8
    max_tile_splits: int = 16
    """Fewest blocks of keys per split of a tile, and most splits."""
    block_seconds: float = 1.4e-6
    merge_seconds: float = 4e-6
    merge_rate: float = 8e11
    """Cost model on an H100: seconds of a tile per block of keys, fixed seconds of a merge, and
    bytes per second of partial states. With it, 128 tokens of 16 heads of 64 take 29 us after 8K
    slots instead of 173, and 1,024 tokens without context 22 instead of 40."""
    three_narrow: dict[str, int] = field(default_factory=lambda: {"maxnreg": 168})
    """Launch options of programs with 4 warps and narrow heads, for keys in pairs of blocks: three
    programs fit into the registers of a multiprocessor."""
    merged: int = 2048
    """Elements of partial states per program of `merge`: few, because all are loaded at once."""
    paging_block_bytes: int = 8 << 20
    """Most bytes of a temporary tensor in loops over blocks, independent of the context length."""
    tma_min_flops: float = 3e10
    """Operations of a launch from which on TMA pays: creating descriptors takes the host tens of
    microseconds. 3e10 is causal attention of 4,096 tokens with 16 heads of 64."""


TUNING = AttentionTuning()
