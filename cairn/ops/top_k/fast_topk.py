"""The k largest values along a dim."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, refuse
from cairn.ops.registry import op
from cairn.ops.top_k.kernels.few import few_kernel, first_kernel

MOST, LONGEST = 16, 1 << 14
"""Largest topk, and longest row, for which the values are found one at a time."""
GROUPS, LONG, WARPS = 128, 4096, 1
"""Groups that a row is split into (twice as many in rows of more than LONG elements), and warps per
program."""
STEP, WHOLE_STEP, ONE_STEP = 8, 32, 16
"""Elements of each group per iteration: with masks, or more groups, more registers are needed;
values without their positions (topk = 1) need fewer."""


@op
def fast_topk(values: Tensor, topk: int, dim: int) -> tuple[Tensor, Tensor]:
    """The topk largest values along a dim, in descending order.

    Args:
        values: any shape and dtype that torch orders.
        topk: 1 <= topk <= values.shape[dim].
        dim: may be negative.
    Returns:
        values and their indices (int64), with topk in place of the dim's size.
    Raises:
        BadArgument: for a dim or a topk that `values` does not have.
    """
    if topk == 1:
        best = torch.max(values, dim=dim, keepdim=True)
        return best.values, best.indices
    found = torch.topk(values, topk, dim=dim)
    return found.values, found.indices


@fast_topk.check
def _(call: Call) -> None:
    if not -call.values.dim() <= call.dim < call.values.dim():
        refuse("fast_topk", "dim", f"is {call.dim}: values has shape {list(call.values.shape)}")
    if not 1 <= call.topk <= call.values.shape[call.dim]:
        refuse("fast_topk", "topk", f"is {call.topk}, not 1 to {call.values.shape[call.dim]}")


def _few(call: Call) -> bool:
    last = call.values.dim() and call.dim % call.values.dim() == call.values.dim() - 1
    plain = call.values.dtype in FLOATS and call.values.is_contiguous()
    return bool(last) and plain and 0 < call.topk <= MOST and 0 < call.values.shape[-1] <= LONGEST


@fast_topk.implementation("triton", devices=gpu.DEVICES, when=_few, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor]:
    """One program per row. The row is read once, and the group of each found value again."""
    width = call.values.shape[-1]
    rows, shape = call.values.numel() // width, (*call.values.shape[:-1], call.topk)
    found = gpu.empty(shape, call.values.dtype, call.values.device)
    indices = gpu.empty(shape, torch.int64, call.values.device)
    groups = GROUPS if width <= LONG else 2 * GROUPS
    size = gpu.next_power_of_2(-(-width // groups))
    whole = size * groups == width
    step = WHOLE_STEP if whole and width <= LONG else STEP
    if rows and call.topk == 1:
        first_kernel[(rows,)](
            x=call.values,
            values=found,
            indices=indices,
            stride=width,
            width=width,
            GROUPS=groups,
            SIZE=size,
            STEP=min(ONE_STEP, size),
            WHOLE=whole,
            num_warps=WARPS,
        )
    elif rows:
        few_kernel[(rows,)](
            x=call.values,
            values=found,
            indices=indices,
            stride=width,
            width=width,
            topk=call.topk,
            GROUPS=groups,
            SIZE=size,
            STEP=min(step, size),
            KP=gpu.next_power_of_2(call.topk),
            LANES=max(32 * WARPS, size),
            WHOLE=whole,
            num_warps=WARPS,
        )
    return found, indices
