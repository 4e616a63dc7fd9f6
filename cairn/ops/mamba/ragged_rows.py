"""First tokens of the rows of a step (cu_seqlens)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INT64, check_min, expect
from cairn.ops.mamba.kernels.rows import ragged_rows_kernel
from cairn.ops.registry import op

NOBODY = -1
BLOCK = 1024
"""Tokens per iteration of the kernel."""


@op
def ragged_rows(row: Tensor, slot: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences of a step, where the host knows only an upper bound `most` of their number.

    Args:
        row: [T] int64, the row of each token; a row's tokens are contiguous.
        slot: [T] int64, the token's slot in the row; -1: padding, after all others.
        most: N, the upper bound.
    Returns:
        starts [N + 1] int32, index of each row's first token, then the end of the last row; rows
        [N] int32, then -1; slots of the first tokens [N] int32, then 0.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    real = slot >= 0
    begins = real.clone()
    begins[1:] &= (row[1:] != row[:-1]) | ~real[:-1]
    place = begins.nonzero()[:most, 0]
    starts = real.sum().expand(most + 1).to(torch.int32).clone()
    rows = torch.full((most,), NOBODY, dtype=torch.int32, device=row.device)
    first = torch.zeros(most, dtype=torch.int32, device=row.device)
    starts[: len(place)] = place.int()
    rows[: len(place)], first[: len(place)] = row[place].int(), slot[place].int()
    return starts, rows, first


@ragged_rows.fake
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (call.most + 1, call.most, call.most)
    first, second, third = (
        torch.empty(n, dtype=torch.int32, device=call.row.device) for n in sizes
    )
    return first, second, third


@ragged_rows.check
def _(call: Call) -> None:
    expect("ragged_rows", "row", call.row, 1, INT64)
    expect("ragged_rows", "slot", call.slot, call.row.shape, INT64, call.row)
    check_min("ragged_rows", "most", call.most, 1)


@ragged_rows.implementation("triton", devices=gpu.DEVICES)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (call.most + 1, call.most, call.most)
    starts, rows, first = (gpu.empty((n,), torch.int32, call.row.device) for n in sizes)
    ragged_rows_kernel[(1,)](
        row=call.row.contiguous(),
        slot=call.slot.contiguous(),
        starts=starts,
        rows=rows,
        first=first,
        tokens=len(call.row),
        most=call.most,
        BLOCK=BLOCK,
    )
    return starts, rows, first
