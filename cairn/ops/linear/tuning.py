"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass, field

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class LinearTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    skinny_rows_tokens: int = 2
    """Most tokens for `rows_kernel`, which multiplies them one by one; `tile_kernel` handles
    more."""
    skinny_tile_bytes: int = 1 << 24
    """Largest weight, with its rows padded to a power of two, for `tile_kernel`. For weights 25%
    larger the library's product takes two thirds of its time."""
    skinny_wide_tile_bytes: int = 1 << 22
    """The same for rows longer than `skinny_span` and more than 8 tokens."""
    skinny_max_width: int = 1 << 14
    skinny_thread_bytes: int = 256
    """Bytes of the weight that a thread holds."""
    skinny_scratch_bytes: int = 1 << 12
    """Shared memory of a program besides its tiles of weight and tokens."""
    skinny_many_rows: int = 1 << 15
    """From this many outputs on, each program has more rows of the weight."""
    skinny_transposed_rows: int = 16
    """Rows of a tile of transposed products, whose first operand is the weight."""
    skinny_span: int = 1 << 10
    skinny_split_rows: int = 8
    skinny_split_programs: int = 1 << 10
    """Split-K: columns and rows of a program's tile, and most programs."""
    cpu_part_bytes: int = 1 << 18
    """Bytes of the weight that a thread reads as several concurrent streams; few, so that they span
    few memory pages."""
    panel_tokens: int = 64
    """Tokens per panel; with more tokens, panels are twice as large."""
    panel_part: int = 64
    panel_stages: int = 6
    """Columns of the weight per iteration (twice as many for small panels of many columns), and
    pipeline stages."""
    panel_many_parts: int = 8
    panel_max_bytes: int = 1 << 25
    """Largest weight, which is prefetched whole into the L2 cache."""
    panel_programs: int = 144
    """Programs that run concurrently on a large device, limited by shared memory."""
    panel_rows: tuple[int, int, int] = (32, 64, 16)
    """Rows of the weight per program; the first entry that gives at most `panel_programs` programs
    is used."""
    panel_max_splits: int = 8
    panel_min_parts: int = 4
    """Split-K: most splits, and least iterations per split."""
    wgmma_min_tokens: int = 3
    wgmma_max_tokens: int = 64
    """Least and most tokens for the warp-group (wgmma) products."""
    wgmma_rows: int = 64
    wgmma_part: int = 128
    wgmma_stages: int = 6
    """Rows per block of the weight (a program has two blocks), columns per iteration, and pipeline
    stages."""
    wgmma_spare: int = 1 << 10
    """Shared memory of a program besides its tiles, in bytes."""
    wgmma_registers: int = 128
    """Registers per thread; few enough that programs of neighbouring small kernels fit on the SM
    too."""
    wgmma_min_bytes: int = (1 << 24) + 1
    """Smallest weight in bytes; smaller ones run in kernels that hold or prefetch the whole
    weight."""
    wgmma_filled: float = 0.35
    wgmma_wide_filled: float = 0.9
    """Least fraction of SMs that have a program, in general and for unsplit products of more than
    32 tokens. With fewer programs the library's product is faster, because it reads the tokens less
    often."""
    wgmma_split_filled: dict[int, float] = field(
        default_factory=lambda: {16: 0.7, 32: 0.7, 64: 0.45}
    )
    """Number of tokens -> fraction of SMs with a program up to which sums are split. Each split is
    written and read again."""
    wgmma_wide_split_bytes: int = 1 << 26
    """Least bytes of a weight whose sums are split for more than 32 tokens although no norm
    follows."""
    wgmma_min_parts: int = 4
    """Least iterations per split."""


TUNING = LinearTuning()
