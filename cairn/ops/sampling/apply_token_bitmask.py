"""Masks of grammars: forbid tokens by single bits."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.registry import op
from cairn.ops.sampling.kernels.adjust import bitmask_kernel
from cairn.ops.testing import Cases, Make

BITS = 32
BLOCK = 2048


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


def _lines(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> bool:
    near = logits.stride(1) == 1 and bitmask.stride(1) == 1
    return near and (rows is None or rows.is_contiguous())


@apply_token_bitmask.implementation("triton", devices=gpu.DEVICES, when=_lines)
def _(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    width = min(logits.shape[1], BITS * bitmask.shape[1])
    if len(bitmask) and width:
        bitmask_kernel[(-(-width // BLOCK), len(bitmask))](
            *(logits, bitmask, rows, logits.stride(0), bitmask.stride(0), width, BLOCK),
            num_warps=gpu.warps_for(BLOCK),
        )


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


@apply_token_bitmask.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32)
        words = draw.randint(-(1 << 31), 1 << 31, rows, -(-vocabulary // BITS), dtype=torch.int32)
        yield Point(
            f"{rows} x {vocabulary}",
            draw.args(logits, words),
            moved(logits, logits, words),
            alternatives=draw.compiled(apply_token_bitmask.reference),
        )
