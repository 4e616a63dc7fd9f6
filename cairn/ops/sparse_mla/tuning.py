"""Tuning constants of this family's launches."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class SparseMlaTuning(Tuning):
    """Tuning constants of this family's launches."""

    score_programs: int = 4096
    """Most programs of the score kernel: many more than run at once, because tokens see different
    numbers of keys."""
    min_score_programs: int = 528
    min_score_tiles: int = 8
    min_chunk_tiles: int = 32
    """Fewest tiles of keys per program once there are more programs than that (for one token, and
    for several tokens of a chunk): a program loads its queries once, and prefetches tiles while it
    multiplies."""
    score_keys: int = 128
    chunk_keys: int = 64
    """Keys per tile, in programs with one token, and in programs with several tokens of a chunk."""
    chunk_columns: int = 128
    """Columns (tokens times heads) of a program with several tokens of a chunk."""
    score_stages: int = 4
    chunk_stages: int = 3
    score_warps: int = 4
    heads: int = 64
    """Most heads per attention program."""
    keys: int = 64
    single_keys: int = 32
    """Candidates per tile, with 16-bit queries and with float32 queries."""
    stages: int = 2
    programs: int = 132
    few_programs: int = 264
    """Number of attention programs up to which candidates are split (split-KV), with `heads` heads
    per program and with fewer."""
    group_heads: int = 64
    group_programs: int = 64
    """Fewest heads, and fewest programs, for which `cells_groups_kernel` runs: with fewer heads
    most rows of its tiles are empty, with fewer programs a token's list is split too often."""
    merged: int = 2048
    """Elements of partial states per program of the merge."""
    store_tokens: int = 4
    """Tokens per program of the cache writes."""


TUNING = SparseMlaTuning()
