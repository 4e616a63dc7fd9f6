"""Rows of a table by index."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect
from cairn.ops.memory.kernels import take_rows_kernel
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import op

BLOCK = 1024


@op
def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """table[index]: the embeddings of tokens, or the last states of sequences.

    Args:
        table: [N, W], rows of any stride.
        index: [T] int32 or int64 in [0, N). Not checked on a GPU.
    Returns:
        [T, W].
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return table.index_select(0, index)


@take_rows.check
def _(call: Call) -> None:
    expect("take_rows", "table", call.table, (None, None), FLOATS)
    expect("take_rows", "index", call.index, (None,), INDICES, like=call.table)


@take_rows.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.table.stride(1) == 1 and call.index.is_contiguous(),
    replayed=True,
)
def _(call: Call) -> Tensor:
    rows, width = call.index.shape[0], call.table.shape[1]
    out = gpu.empty((rows, width), call.table.dtype, call.table.device)
    if out.numel():
        block = min(BLOCK, gpu.next_power_of_2(width))
        blocks, warps = -(-width // block), gpu.warps_for(block)
        pdl = uses_pdl(call.table.device, rows, blocks * warps)
        take_rows_kernel[(rows * blocks,)](
            table=call.table,
            index=call.index,
            out=out,
            stride=call.table.stride(0),
            width=width,
            BLOCKS=blocks,
            BLOCK=block,
            PDL=pdl,
            num_warps=warps,
        )
    return out
