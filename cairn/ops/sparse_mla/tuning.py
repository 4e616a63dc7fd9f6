"""Tuning constants of this family's launches."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class SparseMlaTuning(Tuning):
    """One field a constant."""

    score_programs: int = 4096
    """Programs of scores: many more than run at once, since tokens see keys of unlike number."""
    least_score_programs: int = 528
    least_score_tiles: int = 8
    """Of tokens one by one: from so many programs on, each has so many tiles of keys at least, of
    which it reads one while it multiplies another."""
    score_keys: int = 128
    chunk_keys: int = 64
    """Keys of a tile, of tokens one by one and of tokens side by side in a chunk."""
    chunk_columns: int = 128
    """Heads of the tokens that a program of a chunk has."""
    score_stages: int = 4
    chunk_stages: int = 3
    score_warps: int = 4
    heads: int = 64
    """Of a program of attention, at most."""
    keys: int = 64
    single_keys: int = 32
    """Candidates of a tile; of queries in float32."""
    stages: int = 2
    programs: int = 132
    few_programs: int = 264
    """Programs of attention at once, with many and with few heads: fewer are split."""
    group_heads: int = 64
    group_programs: int = 64
    """Heads, and programs of 64 heads of a token, from which on groups of warps gather and
    multiply, on Hopper: of fewer most of a tile is empty, or the splits are too many."""
    merged: int = 2048
    """Numbers of partial states that a program merges at once."""
    store_tokens: int = 4
    """Tokens of a program that writes to a cache."""


TUNING = SparseMlaTuning()
