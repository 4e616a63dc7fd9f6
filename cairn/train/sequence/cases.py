"""Test cases of this family."""

from __future__ import annotations

import torch

from cairn.ops.testing import Cases, Make
from cairn.train.sequence.sequence_attention import sequence_attention


@sequence_attention.cases
def _(make: Make) -> Cases:
    for dtype, groups, group, length in (
        (torch.float32, 2, 4, 96),
        (torch.bfloat16, 2, 3, 64),
    ):
        heads, size = groups * group, 16
        pages = length // size
        q = make.randn(2, length, heads, 16, dtype=dtype)
        k, v = (make.randn(2, length, groups, 16, dtype=dtype) for _ in range(2))
        # Multiples of 1/4: rounding cannot change the order of their scores.
        z, key = (make.randint(-8, 9, 2, n, heads, 16).to(dtype) / 4 for n in (length, pages))
        bias = make.randint(0, 9, 2, pages, heads).float() / 4
        yield make.args(q, k, v, z, key, bias, size, 20, 2, True)
        yield make.args(q, k, v, z, key, bias, size, 17, pages, False)
        yield make.args(q, k, v, None, None, None, size, 21, aligned=False, mask_landmarks=False)
        yield make.args(q, k, v, None, None, None, size, 20, softmax1=True)
