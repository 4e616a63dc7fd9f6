"""Packs the flags of several segments into bits."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, expect, expect_within, on_host, refuse
from cairn.ops.registry import op
from cairn.ops.speculative.kernels import packbits_kernel
from cairn.ops.speculative.trees import FLAGS

_BLOCK = 512
_MAX_COLUMNS = 64


@op(mutates=("y",))
def segment_packbits(
    x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor, batch_size: int
) -> None:
    """Pack every segment of x into bytes, the first flag in the lowest bit.

    Segment b is x[input_indptr[b] : input_indptr[b + 1]]; its bytes begin at output_indptr[b], and
    the last one is padded with 0. Bytes between segments are not written.

    Args:
        x: [N] bool, or uint8, of which any but 0 is true.
        input_indptr, output_indptr: [batch_size + 1] or longer, int32 or int64.
        y: uint8, flat, written.
        batch_size: segments.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU segments that do not lie in x,
            or whose bytes do not lie in y.
    """
    begin = input_indptr[: batch_size + 1].long()
    place = torch.arange(x.numel(), device=x.device)
    place = place[(place >= begin[0]) & (place < begin[-1])]
    segment = torch.searchsorted(begin, place, right=True) - 1
    inside = place - begin[segment]
    byte = output_indptr.long()[segment] + inside // 8
    y[byte] = 0
    y.index_add_(0, byte, (x[place].bool().int() << (inside % 8).int()).to(torch.uint8))


@segment_packbits.check
def _(call: Call) -> None:
    name = "segment_packbits"
    expect(name, "x", call.x, (None,), FLAGS, dense=-1)
    expect(name, "y", call.y, (None,), (torch.uint8,), call.x, dense=-1)
    if call.batch_size < 0:
        refuse(name, "batch_size", f"is {call.batch_size}, not at least 0")
    for what, tensor in (
        ("input_indptr", call.input_indptr),
        ("output_indptr", call.output_indptr),
    ):
        expect(name, what, tensor, (None,), INDICES, call.x, dense=-1)
        if tensor.numel() <= call.batch_size:
            refuse(name, what, f"has {tensor.numel()} elements, not at least {call.batch_size + 1}")
    begin, out = call.input_indptr[: call.batch_size + 1], call.output_indptr[: call.batch_size]
    expect_within(name, "input_indptr", begin, call.x.numel() + 1)
    expect_within(name, "output_indptr", out, call.y.numel() + 1)
    if on_host(out) and on_host(begin):
        end = int((out + (begin.diff() + 7) // 8).max())
        if end > call.y.numel():
            refuse(name, "y", f"has {call.y.numel()} elements, the segments' bytes end at {end}")


@segment_packbits.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    if call.batch_size and call.x.numel():
        columns = min(_MAX_COLUMNS, -(-call.x.numel() // (8 * _BLOCK * call.batch_size)))
        packbits_kernel[(call.batch_size, columns)](
            x=call.x.view(torch.uint8),
            input_indptr=call.input_indptr,
            output_indptr=call.output_indptr,
            y=call.y,
            BLOCK=_BLOCK,
            num_warps=4,
        )
