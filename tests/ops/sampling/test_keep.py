"""Filters of many long rows, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import min_p_renorm_probs
from cairn.ops.registry import Op
from cairn.ops.sampling.top_k_mask_logits import top_k_mask
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm
from cairn.ops.testing import Arguments, check

pytestmark = pytest.mark.gpu
OPS = [pytest.param(op, id=op.name) for op in (top_k_renorm, top_k_mask, min_p_renorm_probs)]


def drawn(op: Op[..., Any], rows: int, width: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + width)
    logits = 2 * torch.randn(rows, width, device="cuda")
    counts = torch.randint(1, 60, (rows,), device="cuda")
    counts[::7] = width // 3
    if op is top_k_mask:
        return logits, counts
    probs = torch.softmax(logits, dim=-1)
    if op is top_k_renorm:
        return probs, counts
    return probs, torch.rand(rows, device="cuda") * (0.2 if op is min_p_renorm_probs else 0.999)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("rows", "width"), [(1, 100_278), (3, 100_277), (300, 40_001), (64, 301)])
def test_as_the_definition(op: Op[..., Any], rows: int, width: int) -> None:
    check(op, "triton", Arguments(drawn(op, rows, width)))


@pytest.mark.parametrize("op", [*OPS, pytest.param(top_p_renorm, id=top_p_renorm.name)])
def test_the_same_every_time_alone_and_among_others(op: Op[..., Any]) -> None:
    values, parameter = drawn(op, 40, 100_278)
    run = op.using("triton")
    first = run(values, parameter)
    for _ in range(20):
        assert torch.equal(run(values, parameter), first)
    for row in (0, 7, 39):
        at = slice(row, row + 1)
        assert torch.equal(run(values[at], parameter[at])[0], first[row])
