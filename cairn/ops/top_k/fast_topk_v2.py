"""The largest scores of a row, as positions (DeepSeek-V3.2 report, section 2.1: the selection)."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.registry import op
from cairn.ops.top_k import launch, selection
from cairn.ops.top_k.selection import Rows


@op
def fast_topk_v2(
    score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None
) -> Tensor:
    """Positions of the topk largest scores of every row, exact for any scores.

    Row b has the candidates score[b, start : start + n]. With n <= topk the result is 0 .. n - 1,
    whatever the scores hold. Of equal scores the lower position is taken; NaN counts as -inf.
    Candidates outside of the row are ignored.

    Args:
        score: [B, L] float32, rows of any stride.
        lengths: n [B] int32.
        topk: 1 to 4096.
        row_starts: start [B] int32; None: 0.
    Returns:
        [B, topk] int32, relative to start, ascending, padded with -1.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    return selection.select(Rows(score, lengths, row_starts, topk))


@fast_topk_v2.fake
def _(call: Call) -> Tensor:
    return selection.blank(call.score, call.topk)


@fast_topk_v2.check
def _(call: Call) -> None:
    selection.check("fast_topk_v2", Rows(call.score, call.lengths, call.row_starts, call.topk))


def _lines(call: Call) -> bool:
    return launch.accepts(Rows(call.score, call.lengths, call.row_starts, call.topk))


@fast_topk_v2.implementation("topk", devices=("cpu",))
def _(call: Call) -> Tensor:
    return selection.select_by_topk(Rows(call.score, call.lengths, call.row_starts, call.topk))


@fast_topk_v2.implementation("triton", devices=gpu.DEVICES, when=_lines, replayed=True)
def _(call: Call) -> Tensor:
    return launch.select(Rows(call.score, call.lengths, call.row_starts, call.topk))
