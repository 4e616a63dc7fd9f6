"""Cases that norms of one signature share."""

from __future__ import annotations

import torch

from cairn.ops.testing import Cases, Make


def norm_cases(make: Make) -> Cases:
    """Of a norm of rows: (input, weight, eps, out)."""
    yield make.args(make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(1, 4097), make.randn(4097), 1e-5)
    yield make.args(make.randn(0, 16), make.randn(16))
    half = torch.bfloat16
    yield make.args(make.randn(2, 3, 65, dtype=half), make.randn(65, dtype=half), eps=1e-5)
    yield make.args(make.randn(5, 128, dtype=half)[:, :64], make.randn(64))
    yield make.args(make.randn(3, 64, dtype=torch.float16), make.randn(64, dtype=torch.float16))
    yield make.args(make.full((2, 8), 0.0), make.randn(8), out=make.empty(2, 8))
    yield make.args(make.randn(63), make.randn(63), out=make.empty(63, 2)[:, 0])


def sum_cases(make: Make) -> Cases:
    """Of a norm of a sum, both in place: (input, residual, weight, eps)."""
    yield make.args(make.randn(7, 96), make.randn(7, 96), make.randn(96))
    yield make.args(make.randn(0, 16), make.randn(0, 16), make.randn(16))
    yield make.args(make.randn(2, 3, 8), make.randn(2, 3, 8), make.randn(8))
    half = torch.bfloat16
    x, residual = make.randn(3, 65, dtype=half), make.randn(3, 65, dtype=half)
    yield make.args(x, residual, make.randn(65, dtype=half), eps=1e-5)
    x, residual = make.randn(4, 128, dtype=half)[:, :64], make.randn(4, 64, dtype=half)
    yield make.args(x, residual, make.randn(64))
