"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class SamplingTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    chunks: int = 64
    """Most chunks per row."""
    min_chunk: int = 512
    """Least elements per chunk."""
    line: int = 32
    """Elements per line; the survey stores the maximum of each line."""
    width: int = 16
    """Weights per list that a search step loads; a list has at most 1023 times as many, because
    they are counted in 10 bits."""
    draw_warps: int = 8
    """Warps of a program that samples from a row without filters."""
    workspace_bytes: int = 256 << 20
    """Memory for lists; larger batches are filtered in several launches."""
    max_lines: int = 192
    """Most lines that are searched for the kept weights of a row; with more, chunks are."""
    few: int = 256
    rivals: int = 32
    """Rows with at most `few` candidates are ranked by comparing all pairs, `rivals` at a time."""
    run: int = 16
    """Elements per run: a draw finds the chunk, then the run in it, then the token."""
    list_warps: int = 8
    list_registers: int = 128
    """Warps and registers per thread of programs that list rows: two programs fit on an SM."""
    sample: int = 64
    """Elements per chunk that are sampled to estimate the threshold of top-p. It does not depend on
    the number of rows, because the rounding of sums depends on the lists."""
    sure: float = 4.0
    trials: int = 8
    """Margin of the estimate in standard deviations, and number of trial values per step."""
    abreast: int = 4
    ahead: int = 8192
    """Chunks that a program loads at a time, up to `ahead` elements, so that loads overlap."""
    programs: int = 256
    """Programs of a launch that lists rows, which fill a large device. More are slower: each
    program first computes the bound of its row."""
    keep_block: int = 2048
    keep_warps: int = 4
    """Elements and warps of a program that stores the kept probabilities."""
    pdl_rows: int = 256
    """Most rows for launches with PDL."""


TUNING = SamplingTuning()
