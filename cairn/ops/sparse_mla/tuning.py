"""Tuning constants of this family's launches."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class SparseMlaTuning(Tuning):
    """One field a constant."""

    score_programs: int = 4096
    """Programs of the score kernel, at most: many more than run at once, because tokens see
    different numbers of keys."""
    least_score_programs: int = 528
    least_score_tiles: int = 8
    least_chunk_tiles: int = 32
    """With more programs than that, each has at least so many tiles of keys, with one token and
    with several of a chunk: it loads its queries once, and the next tiles while it multiplies."""
    score_keys: int = 128
    chunk_keys: int = 64
    """Keys of a tile, where a program has one token, and where it has several of a chunk."""
    chunk_columns: int = 128
    """Heads of all tokens of such a program of a chunk."""
    score_stages: int = 4
    chunk_stages: int = 3
    score_warps: int = 4
    heads: int = 64
    """Heads of a program of attention, at most."""
    keys: int = 64
    single_keys: int = 32
    """Candidates of a tile: with queries in 16 bits, and in float32."""
    stages: int = 2
    programs: int = 132
    few_programs: int = 264
    """Programs that attention's candidates are split into where there are fewer, with `heads` heads
    a program and with less."""
    group_heads: int = 64
    group_programs: int = 64
    """Fewest heads, and fewest programs, for which `cells_groups_kernel` runs: with fewer heads
    most rows of its tiles are empty, with fewer programs a token's list is split too often."""
    merged: int = 2048
    """Numbers of partial states that a program merges at once."""
    store_tokens: int = 4
    """Tokens of a program that writes to a cache."""


TUNING = SparseMlaTuning()
