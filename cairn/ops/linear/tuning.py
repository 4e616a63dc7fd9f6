"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass, field

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class LinearTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    skinny_rows_tokens: int = 2
    """Most tokens of `rows_kernel`, which takes them one by one; `tile_kernel` takes more."""
    skinny_tile_bytes: int = 1 << 24
    """Largest weight, with its rows padded to a power of two, for `tile_kernel`. At a quarter more
    the library's product takes two thirds of the time."""
    skinny_wide_tile_bytes: int = 1 << 22
    """The same for rows longer than `skinny_span` and more than 8 tokens."""
    skinny_most_width: int = 1 << 14
    skinny_thread_bytes: int = 256
    """Bytes of the weight that a thread holds."""
    skinny_scratch_bytes: int = 1 << 12
    """Shared memory that a program needs beside its tiles of weight and tokens."""
    skinny_many_rows: int = 1 << 15
    """From this many output columns on, programs take more rows of the weight each."""
    skinny_tall_rows: int = 16
    """Rows of a tile whose products have the weight as first operand, not the tokens."""
    skinny_span: int = 1 << 10
    skinny_split_rows: int = 8
    skinny_split_programs: int = 1 << 10
    """Split-K: columns and rows of a program's tile, and most programs."""
    cpu_part_bytes: int = 1 << 18
    """Bytes of the weight that a thread reads as several streams at once: few enough to lie in few
    pages of memory."""
    panel_tokens: int = 64
    """Tokens of a panel; for more a panel has twice as many."""
    panel_part: int = 64
    panel_stages: int = 6
    """Columns of the weight in one step of a program, twice as many for small panels of many
    columns; and pipeline stages."""
    panel_many_parts: int = 8
    panel_most_bytes: int = 1 << 25
    """Largest weight: all of it is prefetched into L2, which is somewhat larger."""
    panel_programs: int = 144
    """Programs that a large device runs at once, by their shared memory."""
    panel_rows: tuple[int, int, int] = (32, 64, 16)
    """Rows of the weight of a program: the first that makes at most `panel_programs`."""
    panel_most_splits: int = 8
    panel_fewest_parts: int = 4
    """Split-K: most splits, and fewest steps of each."""
    wgmma_fewest: int = 3
    wgmma_most: int = 64
    """Fewest and most tokens of the products by warp groups."""
    wgmma_rows: int = 64
    wgmma_part: int = 128
    wgmma_stages: int = 6
    """Rows of a block of the weight, of which a program takes two; columns in one step; and
    pipeline stages."""
    wgmma_spare: int = 1 << 10
    """Bytes of a program's memory beside those."""
    wgmma_registers: int = 128
    """Of a thread: programs of the small kernels around have place beside it."""
    wgmma_least_bytes: int = (1 << 24) + 1
    """Of a weight: smaller ones are held or asked for whole by other kernels."""
    wgmma_filled: float = 0.35
    wgmma_wide_filled: float = 0.9
    """Share of a device's processors that have a program at least, and where programs of more than
    32 tokens are all there is to a product: with fewer, the library's reads less of the tokens."""
    wgmma_split_filled: dict[int, float] = field(
        default_factory=lambda: {16: 0.7, 32: 0.7, 64: 0.45}
    )
    """Sums are split until so many have one, by its tokens: every split is written and read
    again."""
    wgmma_wide_split_bytes: int = 1 << 26
    """Of a weight for more than 32 tokens whose sums are split though no norm reads them."""
    wgmma_fewest_parts: int = 4
    """Of a split."""


TUNING = LinearTuning()
