"""Selection of the k largest scores of a chunk."""

import math

import numpy as np
import pytest
import torch

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.select_k.kernels import largest

pytestmark = pytest.mark.skipif(
    not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA"
)
NAN_OF_ONES = np.array(0x7FFFFFFF, np.int32).view(np.float32).item()
"""The canonical NaN of NVIDIA GPUs."""


@triton.jit
def largest_kernel(value, taken, place, total, count, N: tl.constexpr):
    i = tl.arange(0, N)
    kept, at, _ = largest(tl.load(value + i), i < total, total, count, N)
    tl.store(taken + i, kept.to(tl.int32))
    tl.store(place + i, at)


def found(value, total, count):
    """The numbers that are taken, in the order of their places."""
    taken, place = torch.zeros(2, len(value), dtype=torch.int32)
    largest_kernel[(1,)](value, taken, place, total, count, len(value))
    chosen = taken.nonzero()[:, 0]
    assert place[chosen].tolist() == list(range(len(chosen)))
    return chosen.tolist()


@pytest.mark.parametrize("count", [1, 3, 40, 64])
@pytest.mark.parametrize("none", [0, 1, 2, 3, 5, 20, 64])
def test_nan_is_the_largest(none, count):
    g = torch.Generator().manual_seed(none)
    value = torch.randn(64, generator=g)
    value[torch.randperm(64, generator=g)[:none]] = math.inf
    wanted = value.sort(descending=True, stable=True).indices[:count].sort().values
    value[value == math.inf] = NAN_OF_ONES
    assert value.view(torch.int32).max() == 0x7FFFFFFF or not none
    assert found(value, 64, count) == wanted.tolist()


@pytest.mark.parametrize("size", [1 << 10, 1 << 14, 1 << 15, 1 << 16])
def test_of_equal_ones_the_first_are_taken(size):
    assert found(torch.zeros(size), size, 300) == list(range(300))
    value = torch.zeros(size)
    value[size - 5 :] = 1.0
    assert found(value, size, 300) == [*range(295), *range(size - 5, size)]


@pytest.mark.parametrize("implementation", ["triton_few", "triton_many"])
def test_a_token_without_scores_leaves_the_others_theirs(implementation):
    """Otherwise more than k would be selected and written beyond the row's outputs."""
    g = torch.Generator().manual_seed(0)
    z, key = (torch.randn(n, 1, 16, generator=g) for n in (3, 40))
    row = torch.tensor([0, 1, 0])
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    bias = torch.zeros(40, 1)
    bias[20:] = NAN_OF_ONES
    given = (row, torch.full((3,), 79), table, 4, 9, 3)
    indices, scores = select_pages.using(implementation)(z, key, bias, torch.zeros(3, 1), *given)
    wanted = select_pages.reference(z, key, bias, torch.zeros(3, 1), *given)
    for token in (0, 2):
        assert torch.equal(indices[token], wanted[0][token])
        torch.testing.assert_close(scores[token], wanted[1][token])
    assert indices[1].min() >= 0 and indices[1].max() < 18
    assert scores[1].isnan().all()
