"""The bound from which on a row's weights are listed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.lists import reached_by

pytestmark = pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
LINES = 64


@triton.jit
def bounds_kernel(keys, wanted, enough, out, N: tl.constexpr):
    """out [n]: `reached_by` keys [n, N]."""
    row = tl.program_id(0)
    key = tl.load(keys + row * N + tl.arange(0, N))
    tl.store(out + row, reached_by(key, wanted, enough))


def rows_of(kind: str) -> Tensor:
    torch.manual_seed(7)
    if kind == "zeros":
        return torch.zeros(3, LINES)
    if kind == "equal":
        return torch.rand(20, LINES).mul(4).round() / 4
    return torch.softmax(torch.randn(60, LINES) * float(kind), dim=-1)


@pytest.mark.parametrize("wanted", [1, 2, 7, 40, LINES])
@pytest.mark.parametrize("kind", ["zeros", "equal", "0.001", "1", "3", "20"])
def test_as_many_as_are_wanted_and_few_more_reach_the_bound(
    kind: str, wanted: int, device: str
) -> None:
    if device == "cpu" and not gpu.INTERPRETED:
        pytest.skip("needs a GPU, or Triton's interpreter")
    enough = wanted + wanted // 8
    keys = rows_of(kind).to(device).view(torch.int32)
    out = torch.empty(len(keys), dtype=torch.int32, device=device)
    bounds_kernel[(len(keys),)](keys, wanted, enough, out, LINES)
    reach = (keys >= out[:, None]).sum(1)
    assert (reach >= wanted).all()
    # More of them only where the next number is too much.
    assert ((reach <= enough) | ((keys > out[:, None]).sum(1) < wanted)).all()
