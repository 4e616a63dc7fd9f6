"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class SamplingTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    chunks: int = 64
    """Most chunks of a row."""
    least_chunk: int = 512
    """Elements of the shortest chunk."""
    line: int = 32
    """Elements of a line, of which the survey stores the maximum."""
    width: int = 16
    """Weights of every list that a program loads at a time while it searches; a list has at most
    1023 times as many, since their number is counted in 10 bits."""
    draw_warps: int = 8
    """Of a program that draws from a row without filters."""
    workspace_bytes: int = 256 << 20
    """Memory for lists; more rows are filtered some at a time."""
    most_lines: int = 192
    """Lines in which all that is kept of a row is looked for."""
    few: int = 256
    rivals: int = 32
    """Weights of a row that are compared with all others instead of searched, and so many at
    once."""
    run: int = 16
    """Elements of a run: the draw finds the chunk, then the run, then the token."""
    list_warps: int = 8
    list_registers: int = 128
    """Warps and registers of programs that list rows: two fit on a multiprocessor."""
    sample: int = 64
    """Elements of each chunk from which it is guessed where the threshold of a share lies. Not by
    how many rows there are: sums of what is listed are rounded as it is listed."""
    sure: float = 4.0
    trials: int = 8
    """Standard deviations that the guess leaves on each side, and weights that are tried at a
    time."""
    abreast: int = 4
    ahead: int = 8192
    """Chunks that a program lists at a time, of so many numbers: while the first is, the others are
    on their way."""
    programs: int = 256
    """Programs that fill a large device when they list: each finds the bound of its row first."""
    keep_block: int = 2048
    keep_warps: int = 4
    """Elements and warps of a program that stores what a row keeps."""
    pdl_rows: int = 256
    """At most this many rows launch each kernel with PDL."""


TUNING = SamplingTuning()
