"""Which part of which row a program computes."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def row_and_part(parts):
    """Row (int64) and part of the row of this program. Neighbouring programs get neighbouring
    parts, which is fastest for memory."""
    program = tl.program_id(0)
    return (program // parts).to(tl.int64), program % parts
