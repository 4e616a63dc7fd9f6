"""Results do not depend on an element's position. On a CPU torch rounds sigmoid, silu and softplus
differently in the remainder of a row that fills no SIMD vector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cairn import ops


def by_gates(x: Tensor) -> Tensor:
    tokens = x.view(-1, 1)
    none = torch.zeros(1)
    g, beta = ops.fused_gdn_gating(none, tokens, tokens, none)
    return torch.cat((g[0], beta[0]), dim=1)


def by_convolution(x: Tensor) -> Tensor:
    y = x.clone()[None]
    starts = torch.tensor([0, len(x)], dtype=torch.int32)
    ops.causal_conv1d_fwd(y, torch.ones(1, 1), None, None, starts, None, None, True, -1)
    return y[0, :, None]


def by_norm(x: Tensor) -> Tensor:
    ones = torch.ones(len(x), 1)
    return ops.fused_rmsnorm_gated(ones, torch.ones(1), x[:, None])


@pytest.mark.parametrize("compute", [by_gates, by_convolution, by_norm])
def test_a_tokens_place_changes_no_bit(compute: Callable[[Tensor], Tensor]) -> None:
    x = 4 * torch.randn(150, generator=torch.Generator().manual_seed(0))
    whole = compute(x)
    for first in range(0, 64, 9):
        for size in range(1, 40):
            assert torch.equal(compute(x[first : first + size]), whole[first : first + size])
