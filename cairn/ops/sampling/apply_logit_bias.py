"""Per-request additions to single logits."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op(mutates=("logits",))
def apply_logit_bias(logits: Tensor, index: Tensor, bias: Tensor) -> None:
    """logits[row, token] += bias in place; entries that name the same place add up.

    Args:
        logits: [B, V] float32.
        index: [n, 2] int64, (row, token).
        bias: [n] float32; -inf forbids the token.
    """
    logits.index_put_((index[:, 0], index[:, 1]), bias, accumulate=True)


@apply_logit_bias.cases
def _(make: Make) -> Cases:
    index = make.tensor([[0, 3], [2, 0], [2, 6], [0, 3]], dtype=torch.int64)
    yield make.args(make.randn(3, 7), index, make.tensor([1.5, -100.0, float("-inf"), 0.25]))
    yield make.args(make.randn(2, 5), index[:0], make.randn(0))
