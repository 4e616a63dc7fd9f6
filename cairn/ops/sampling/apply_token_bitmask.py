"""Masks of grammars: forbid tokens by single bits."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

BITS = 32


@op(mutates=("logits",))
def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """logits[row, token] = -inf in place where the token's bit is 0.

    Token t is allowed by bit t % 32 of word t // 32. Tokens beyond the words and bits beyond the
    tokens are left alone.

    Args:
        logits: [B, V] floating point.
        bitmask: [n, W] int32.
        rows: [n] int64, the row of logits that each line of `bitmask` is for, none twice;
            None: all, in order (n = B).
    """
    shifts = torch.arange(BITS, dtype=torch.int32, device=bitmask.device)
    forbidden = ((bitmask[..., None] >> shifts) & 1).flatten(1) == 0
    width = min(logits.shape[1], forbidden.shape[1])
    part = logits if rows is None else logits[rows]
    part[:, :width].masked_fill_(forbidden[:, :width], -torch.inf)
    if rows is not None:
        logits[rows] = part


@apply_token_bitmask.cases
def _(make: Make) -> Cases:
    low, high = -(1 << 31), (1 << 31) - 1
    words = torch.int32
    yield make.args(make.randn(3, 70), make.randint(low, high, 3, 3, dtype=words))
    yield make.args(make.randn(2, 96), make.tensor([[0, -1, low], [1, 0, high]], dtype=words))
    yield make.args(make.randn(2, 96), make.randint(low, high, 2, 2, dtype=words))
    yield make.args(make.randn(2, 33), make.randint(low, high, 2, 5, dtype=words))
    rows = make.tensor([4, 0], dtype=torch.int64)
    bits = make.randint(low, high, 2, 10, dtype=words)
    yield make.args(make.randn(5, 301, dtype=torch.bfloat16), bits, rows)
    yield make.args(make.randn(3, 40), bits[:0, :2], rows[:0])
