"""Where the programs of a kernel work, when rows are cut into parts."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def row_and_part(parts):
    """The row that a program works at (int64), and which of the row's parts: parts lie side by side
    in the grid as they do in memory, which is read and written fastest so."""
    program = tl.program_id(0)
    return (program // parts).to(tl.int64), program % parts
