"""Tuning constants of this family's launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cairn.ops.tuning import Tuning


class Tile(NamedTuple):
    """Tile sizes of a program of a grouped product.

    Attributes:
        rows: rows (of tokens) per tile.
        columns: columns of the result per tile, at most 128 in fp8.
        part: columns of a matrix (along K) per iteration; 128 in fp8.
        warps, stages: num_warps and num_stages of the launch.
        together: tiles of rows that are multiplied with all columns before the next ones.
        table: matrices are loaded by TMA.
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
    """Tuning constants of this family's launches; tests replace them by `replaced`.

    The keys of `tiles` tell the operands: "16" for 16-bit floats, "8" for fp8 codes, "32" for
    float32. The first entry is taken whose number is at least the mean number of rows per expert,
    else the last.
    """

    sort_pairs: int = 1024
    """Up to this many pairs, each program counts all of them; of more, a chunk."""
    sort_rows: int = 16
    """Pairs whose rows such a program stores."""
    sort_chunk: int = 256
    """Pairs per program where several programs share the sort."""
    sort_step: int = 32
    """Pairs that each pair is compared with per iteration."""
    sort_counts: int = 1 << 14
    """Counts of chunks that are summed per iteration."""
    single_pairs: int = 16
    """Up to this many pairs are not sorted; each gets a tile of its own."""
    min_rows: int = 16
    min_columns: int = 16
    """Tiles of at most this many rows get fewer columns, down to this many, where there are few
    programs."""
    quantized_inside: int = 512
    """Widest rows of such tiles that every program of an fp8 product quantises itself."""
    vector_width: int = 8192
    """Widest single row that is multiplied without tensor cores."""
    vector_bytes: int = 1 << 14
    """Bytes of the matrix that a program of such a product loads."""
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
    """(mean rows per expert up to which the tiles are used, tile of the first product, tile of the
    second); both tiles have the same rows."""


TUNING = MoeTuning()
