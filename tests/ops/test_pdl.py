"""Kernels launched with PDL wait for the previous kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cairn.ops import (
    concat_mla_absorb_q,
    fused_add_rmsnorm,
    gelu_quick,
    head_norm_rope,
    min_p_renorm_probs,
    rmsnorm,
    silu_and_mul,
    take_rows,
)

ROUNDS = 16


def chain(rows: int, width: int, device: str, after_each: Callable[[], None]) -> list[Tensor]:
    """A sequence of small kernels, each of which depends on the previous one."""
    torch.manual_seed(rows)
    x, residual = (torch.randn(rows, width, device=device) for _ in range(2))
    weight = torch.rand(width, device=device) + 0.5
    by_head = weight.view(4, -1)
    backwards = torch.arange(rows, device=device).flip(0)
    least = torch.full((rows,), 1e-3, device=device)
    for _ in range(ROUNDS):
        fused_add_rmsnorm(x, residual, weight)
        after_each()
        y = gelu_quick(x)
        after_each()
        y = head_norm_rope(y.view(rows, 4, -1), by_head, None).view(rows, width)
        after_each()
        both = concat_mla_absorb_q(x, y)
        after_each()
        x = silu_and_mul(both)
        after_each()
        x = rmsnorm(x, weight, out=x)
        after_each()
        x = take_rows(x, backwards)
        after_each()
        x = min_p_renorm_probs(x.square(), least)
        after_each()
    return [x, residual]


@pytest.mark.parametrize("rows, width", [(1, 1024), (7, 512), (300, 1024)])
def test_waits_for_the_kernel_in_front(rows: int, width: int, device: str) -> None:
    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found = chain(rows, width, device, lambda: None)
    wanted = chain(rows, width, device, finish)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
