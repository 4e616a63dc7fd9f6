"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.hyper.mhc_head import mhc_head
from cairn.ops.hyper.mhc_post import mhc_post
from cairn.ops.hyper.mhc_pre import mhc_pre
from cairn.ops.testing import Cases, Make

SIZES = ((5, 4, 24), (3, 2, 100), (1, 3, 7), (0, 4, 8))
"""Tokens, streams, hidden size."""


@mhc_pre.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for (tokens, count, hidden), eps, iterations in zip(
            SIZES, (1e-6, 1e-3, 1e-2, 1e-6), (20, 3, 1, 2), strict=True
        ):
            rows = (2 + count) * count
            yield make.args(
                make.randn(tokens, count, hidden, dtype=dtype),
                make.randn(rows, count * hidden, scale=(count * hidden) ** -0.5),
                make.randn(3),
                make.randn(rows),
                1e-6,
                eps,
                iterations,
            )


@mhc_post.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, count, hidden in SIZES:
            yield make.args(
                make.randn(tokens, count, hidden, dtype=dtype),
                make.randn(tokens, hidden, dtype=dtype),
                make.rand(tokens, count),
                make.rand(tokens, count, count),
            )


@mhc_head.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, count, hidden in SIZES:
            yield make.args(
                make.randn(tokens, count, hidden, dtype=dtype),
                make.randn(count, count * hidden, scale=(count * hidden) ** -0.5),
                make.randn(1),
                make.randn(count),
                1e-6,
                1e-3,
            )
