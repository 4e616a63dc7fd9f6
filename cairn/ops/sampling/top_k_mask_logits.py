"""Top-k filter of logits (Fan et al. 2018, section 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Alternative, Draw, Point, Points, flashinfer, moved
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES
from cairn.ops.registry import op
from cairn.ops.sampling import arguments, launch
from cairn.ops.select_k import launch as select_k
from cairn.ops.testing import Cases, Make

NAME = "top_k_mask_logits"


@op
def top_k_mask(logits: Tensor, top_k: Tensor) -> Tensor:
    """top_k_mask_logits with a tensor of k.

    Args:
        logits: [B, V] float32, bfloat16 or float16.
        top_k: [B] int32 or int64; k < 1 or k >= V keeps all.
    Returns:
        [B, V], logits' dtype.
    """
    vocabulary = logits.shape[1]
    limited = (top_k >= 1) & (top_k < vocabulary)
    k = torch.where(limited, top_k, vocabulary).long()
    least = logits.sort(dim=-1, descending=True).values.gather(-1, k[:, None] - 1)
    return torch.where((logits >= least) | ~limited[:, None], logits, -torch.inf)


@top_k_mask.check
def _(call: Call) -> None:
    arguments.check_rows(NAME, "logits", call.logits, FLOATS)
    arguments.check_parameter(NAME, "top_k", call.top_k, call.logits, INDICES)


@top_k_mask.front(replayed=True)
def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """The k largest logits of each row and their equals as they are, the others -inf.

    NaN counts among the largest, and becomes -inf.

    Args:
        logits: [B, V] float32, bfloat16 or float16; rows may be strided.
        top_k: a number, or [B] int32 or int64; k < 1 or k >= V keeps all.
    Returns:
        [B, V], logits' dtype, contiguous.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    arguments.check_rows(NAME, "logits", logits, FLOATS)
    return top_k_mask(logits, arguments.counts(NAME, "top_k", top_k, logits))


def _rows(call: Call) -> bool:
    return launch.accepts(call.logits, call.top_k, dtypes=FLOATS)


@top_k_mask.implementation("triton", devices=gpu.DEVICES, when=_rows, replayed=True)
def _(call: Call) -> Tensor:
    """The k-th largest is searched for; nothing is sorted."""
    return select_k.mask_smaller(call.logits, call.top_k)


@top_k_mask.cases
def _(make: Make) -> Cases:
    inf, nan = float("inf"), float("nan")
    k = make.tensor([1, 2, 50, 301, 1000, 0], torch.int64)
    yield make.args(make.randn(6, 301), k)
    for dtype in FLOATS:
        ties = make.randint(-9, 9, 3, 63).to(dtype)
        yield make.args(ties, make.tensor([7, 1, 62], torch.int32))
    odd = [[0.0, -0.0, 1.0, -1.0], [inf, -inf, 2.0, inf], [-inf, -inf, -inf, 1e-40]]
    yield make.args(make.tensor([*odd, [-1e-45, 0.0, -2.0, -3.0]]), make.tensor([2, 3, 2, 2]).int())
    yield make.args(make.randn(2, 5100)[:, 17:5050], make.tensor([40, 4000], torch.int32))
    yield make.args(make.tensor([[nan, 1.0, 2.0], [nan, nan, 1.0]]), make.tensor([2, 1]).int())
    yield make.args(make.randn(0, 9), k[:0])


def _topk(call: Call) -> Tensor:
    """By torch.topk, where the host knows the largest k."""
    least = call.logits.topk(50, dim=-1).values.gather(-1, call.top_k.long()[:, None] - 1)
    return call.logits.masked_fill(call.logits < least, -torch.inf)


@top_k_mask.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32)
        top_k = draw.randint(1, 51, rows, dtype=torch.int32)
        others = (
            Alternative("topk", _topk),
            *draw.by_torch(top_k_mask.reference),
            *flashinfer("sampling.top_k_mask_logits"),
        )
        size = f"{rows} x {vocabulary}"
        yield Point(size, draw.args(logits, top_k), moved(logits, logits), alternatives=others)
