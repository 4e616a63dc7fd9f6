"""The largest scores of a row, as indices into the concatenated keys of all requests."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect
from cairn.ops.registry import op
from cairn.ops.top_k import launch, selection
from cairn.ops.top_k.selection import NONE, Rows


@op
def fast_topk_transform_ragged_fused(
    score: Tensor,
    lengths: Tensor,
    topk_indices_offset: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """`fast_topk_v2`, with the row's offset added to each position.

    Args:
        score, lengths, topk, row_starts: as in `fast_topk_v2`.
        topk_indices_offset: [B] int32.
    Returns:
        [B, topk] int32, ascending, padded with -1.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    place = selection.select(Rows(score, lengths, row_starts, topk))
    return torch.where(place >= 0, place + topk_indices_offset[:, None], NONE)


@fast_topk_transform_ragged_fused.fake
def _(call: Call) -> Tensor:
    return selection.blank(call.score, call.topk)


@fast_topk_transform_ragged_fused.check
def _(call: Call) -> None:
    name = "fast_topk_transform_ragged_fused"
    selection.check(name, Rows(call.score, call.lengths, call.row_starts, call.topk))
    batch = call.score.shape[:1]
    expect(
        name,
        "topk_indices_offset",
        call.topk_indices_offset,
        batch,
        (torch.int32,),
        like=call.score,
    )


def _lines(call: Call) -> bool:
    near = call.topk_indices_offset.is_contiguous()
    return near and launch.accepts(Rows(call.score, call.lengths, call.row_starts, call.topk))


@fast_topk_transform_ragged_fused.implementation(
    "triton", devices=gpu.DEVICES, when=_lines, replayed=True
)
def _(call: Call) -> Tensor:
    return launch.select(
        Rows(call.score, call.lengths, call.row_starts, call.topk), offset=call.topk_indices_offset
    )
