"""Mapping of a one-dimensional grid to rows and parts of rows."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def row_and_part(parts):
    """Row (int64) and part of the row that this program computes. Consecutive programs have
    consecutive parts of a row, so that their memory accesses are adjacent."""
    program = tl.program_id(0)
    return (program // parts).to(tl.int64), program % parts
