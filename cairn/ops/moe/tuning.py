"""Tuning constants of this family's launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cairn.ops.tuning import Tuning


class Tile(NamedTuple):
    """What a program of a grouped product computes at once.

    Attributes:
        rows: of tokens.
        columns: of the result, at most 128 in fp8.
        part: columns of a matrix in one step; 128 in fp8.
        warps, stages: of the launch.
        together: tiles of rows that go through all columns together.
        table: matrices are copied by the device's engine (TMA).
    """

    rows: int
    columns: int
    part: int
    warps: int
    stages: int
    together: int = 8
    table: bool = False


@dataclass(slots=True)
class MoeTuning(Tuning):
    """One field a constant.

    Tiles stand by what is multiplied: "16" numbers of 16 bits, "8" codes of 8, "32" float32; behind
    it "gated" for the first product of an expert, "plain" for the second. The first entry whose
    rows are not below the mean of an expert's is taken, else the last.
    """

    sort_places: int = 1024
    """Up to this many places each program counts all of them; of more, a chunk."""
    sort_rows: int = 16
    """Places whose rows such a program stores."""
    sort_chunk: int = 256
    """Places of a program where several sort."""
    sort_step: int = 32
    """Places that each is compared with at once."""
    sort_counts: int = 1 << 14
    """Counts of chunks that are added up at once."""
    single_places: int = 16
    """At most so many places, a tile each, are not sorted."""
    fewest_rows: int = 16
    fewest_columns: int = 16
    """Tiles of so few rows have fewer columns, down to so many, where there are few programs."""
    quantized_inside: int = 512
    """Widest rows of such tiles that every program of a product in fp8 quantises itself."""
    vector_width: int = 8192
    """Widest row that is multiplied by itself without tensor cores."""
    vector_bytes: int = 1 << 14
    """Bytes of a matrix that a program of such a product loads."""
    vector_warps: int = 4
    tiles: dict[str, tuple[tuple[int, Tile, Tile], ...]] = field(
        default_factory=lambda: {
            "16": (
                (16, Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 4)),
                (64, Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
                (128, Tile(128, 128, 64, 8, 4, 8, True), Tile(128, 256, 64, 8, 4, 8, True)),
            ),
            "8": (
                (16, Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 4, 4)),
                (64, Tile(64, 128, 128, 8, 4, 8, True), Tile(64, 128, 128, 4, 4, 8, True)),
                (128, Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 4, 8, True)),
            ),
            "32": ((16, Tile(16, 32, 32, 4, 3), Tile(16, 32, 32, 4, 3)),),
        }
    )
    """Mean rows of an expert up to which tiles serve, and the tiles of both products, which have
    the same rows."""


TUNING = MoeTuning()
