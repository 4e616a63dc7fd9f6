"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass, field

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class LinearTuning(Tuning):
    """One field a constant."""

    skinny_rows_tokens: int = 2
    """At most this many tokens pass by a program's rows one by one."""
    skinny_tile_bytes: int = 1 << 24
    """Of a weight with its rows padded, that a tile passes by at most: where they are a quarter
    more, the library's product of several tokens takes two thirds of the time."""
    skinny_wide_tile_bytes: int = 1 << 22
    """The same of rows longer than SPAN and more than 8 tokens."""
    skinny_most_width: int = 1 << 14
    skinny_thread_bytes: int = 256
    """Of the weight, that a thread holds."""
    skinny_scratch_bytes: int = 1 << 12
    """Of a program's memory, beside what it holds of weight and tokens."""
    skinny_many_rows: int = 1 << 15
    """From this many numbers a token on, programs take more rows each."""
    skinny_tall_rows: int = 16
    """Of a tile that is the tall side of its product, and not the tokens."""
    skinny_span: int = 1 << 10
    skinny_split_rows: int = 8
    skinny_split_programs: int = 1 << 10
    """Columns and rows of a tile whose sums are split, and how many of them run at once."""
    cpu_part_bytes: int = 1 << 18
    """Of the weight that are read together, as several streams: close enough to lie in few
    pages."""
    panel_tokens: int = 64
    """Of a panel; more make one of twice as many."""
    panel_part: int = 64
    panel_stages: int = 6
    """Columns of the weight that a program takes at a time, twice as many where a panel is small
    and its columns are many; and how many times that it has at once."""
    panel_many_parts: int = 8
    panel_most_bytes: int = 1 << 25
    """Of a weight: all of it is asked for, and a cache of a large device holds somewhat more."""
    panel_programs: int = 144
    """Programs that a large device runs at once, each with memory for its parts."""
    panel_rows: tuple[int, int, int] = (32, 64, 16)
    """Of the weight, that a program takes: the first that make so few programs."""
    panel_most_splits: int = 8
    panel_fewest_parts: int = 4
    """Of a sum that is split, and parts of each of them."""
    wgmma_fewest: int = 3
    wgmma_most: int = 64
    """Tokens of these products."""
    wgmma_rows: int = 64
    wgmma_part: int = 128
    wgmma_stages: int = 6
    """Rows of a block of the weight, of which a program takes two; columns of a part of them; and
    how many parts it has at once."""
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
