"""Greedy choice of a token per row."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32
from cairn.ops.registry import op
from cairn.ops.sampling import launch
from cairn.ops.sampling.arguments import check_rows


@op
def argmax_tokens(logits: Tensor) -> Tensor:
    """The token with the largest logit; ties go to the lowest id.

    Args:
        logits: [n, V] float32.
    Returns:
        [n] int64; -1 for a row that holds NaN, or nothing but -inf.
    Raises:
        BadArgument: for another shape or dtype.
    """
    best, token = logits.max(dim=-1)
    return token.masked_fill(best.isnan() | (best == -torch.inf), -1)


@argmax_tokens.check
def _(call: Call) -> None:
    check_rows("argmax_tokens", "logits", call.logits, FLOAT32)


def _accepts(call: Call) -> bool:
    return launch.accepts(call.logits) and call.logits.shape[0] <= launch.MAX_ROWS


@argmax_tokens.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(call: Call) -> Tensor:
    return launch.argmax(call.logits)
