"""Muon's matrices are nearly orthogonal; Adam equals torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cairn.train.optimizer import BETAS, Optimizer, orthogonalised
from cairn.train.recipe import Rates


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 4, 16), (3, 16, 4)])
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    found = orthogonalised(torch.randn(shape))
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.4
    assert values.median() > 0.6


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Parameter(torch.randn(5, 4))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.gain = nn.Parameter(torch.ones(4))

    def loss(self) -> torch.Tensor:
        return ((self.embed * self.gain) @ self.matrix).square().sum()


def test_embedding_and_gains_follow_adam():
    own, other = Small(), Small()
    rates = Rates(matrices=0.0, embedding=0.01, gains=0.03)
    optimizer = Optimizer(own, rates)
    adam = torch.optim.Adam(
        [{"params": [other.embed], "lr": 0.01}, {"params": [other.gain], "lr": 0.03}], betas=BETAS
    )
    for step in range(5):
        torch._foreach_zero_(optimizer.gradients())
        own.loss().backward()
        optimizer.prepare(step, 1.0)
        optimizer.apply()
        adam.zero_grad()
        other.loss().backward()
        adam.step()
    torch.testing.assert_close(own.embed, other.embed)
    torch.testing.assert_close(own.gain, other.gain)
    torch.testing.assert_close(own.matrix, other.matrix)


def test_a_matrix_goes_downhill_as_far_as_the_rate_says():
    model = Small()
    optimizer = Optimizer(model, Rates(matrices=0.1, embedding=0.0, gains=0.0))
    before, loss = model.matrix.detach().clone(), model.loss()
    loss.backward()
    optimizer.prepare(0, 0.5)
    optimizer.apply()
    assert model.loss() < loss
    moved = torch.linalg.svdvals(model.matrix.detach() - before)
    assert 0.02 < moved.median() < 0.07
