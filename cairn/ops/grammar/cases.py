"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.checks import FLOATS
from cairn.ops.grammar.apply_token_bitmask_inplace_cuda import mask_tokens
from cairn.ops.testing import Cases, Make


@mask_tokens.cases
def _(make: Make) -> Cases:
    low, high = -(1 << 31), (1 << 31) - 1
    words = torch.int32
    yield make.args(make.randn(3, 70), make.randint(low, high, 3, 3, dtype=words))
    for dtype in FLOATS:
        # Blocks inside a row, which begin between the words of the mask.
        long = make.randn(3, 2501, dtype=dtype)
        yield make.args(long, make.randint(low, high, 3, 79, dtype=words))
    yield make.args(make.randn(2, 96), make.tensor([[0, -1, low], [1, 0, high]], dtype=words))
    yield make.args(make.randn(2, 96), make.randint(low, high, 2, 2, dtype=words))
    yield make.args(make.randn(2, 33), make.randint(low, high, 2, 5, dtype=words))
    yield make.args(make.randn(63), make.randint(low, high, 2, dtype=words))
    yield make.args(make.randn(63), make.randint(low, high, 1, 2, dtype=words))
    yield make.args(make.randn(3, 200)[:, :97], make.randint(low, high, 3, 8, dtype=words)[:, :4])
    rows = make.tensor([4, 0], dtype=torch.int64)
    bits = make.randint(low, high, 5, 10, dtype=words)
    yield make.args(make.randn(5, 301, dtype=torch.bfloat16), bits, rows)
    yield make.args(make.randn(5, 301, dtype=torch.float16), bits, rows.int())
    yield make.args(make.randn(6, 301), bits, rows)
    yield make.args(make.randn(5, 40), bits[:, :2], rows[:0])
    yield make.args(make.randn(0, 40), bits[:0, :2])
