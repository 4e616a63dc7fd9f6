"""A captured step on a GPU equals the eager one, and can be interrupted anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cairn.models.registry import load_spec
from cairn.train.checkpoint import Progress, load_state, save_state
from cairn.train.data import Batches, load_corpus
from cairn.train.model import TrainedModel
from cairn.train.recipe import Recipe
from cairn.train.step import TrainStep

STEPS = 4


def training(recipe: Recipe, dtype: torch.dtype, device: str) -> TrainStep:
    return TrainStep(TrainedModel(load_spec(recipe.config), 0).to(device), recipe, dtype)


@pytest.fixture
def batches(library: Path, recipe: Recipe) -> Batches:
    return Batches(recipe, *load_corpus([library], recipe.tokenizer, 300), (15, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_are_the_eager_ones(batches, recipe, dtype):
    graphs, eager = training(recipe, dtype, "cuda"), training(recipe, dtype, "cuda")
    for step in range(STEPS):
        batch = batches.train(step)
        found = graphs(batch, step).clone()
        inputs = eager._inputs_of(batch)
        eager.optimizer.prepare(step, recipe.rates.factor(step, recipe.steps))
        eager._gradients(inputs, batch.topk)
        eager.optimizer.apply()
        torch.testing.assert_close(found, eager.metrics, rtol=1e-4, atol=1e-5)
    for a, b in zip(graphs.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_the_gpu_takes_the_steps_of_the_cpu(batches, recipe):
    own, other = (training(recipe, torch.float32, device) for device in ("cuda", "cpu"))
    for step in range(2):
        batch = batches.train(step)
        torch.testing.assert_close(own(batch, step).cpu(), other(batch, step), rtol=1e-3, atol=1e-4)


def test_going_on_from_a_state_gives_the_same_steps(batches, recipe, device, tmp_path):
    whole = training(recipe, torch.float32, device)
    wanted = [whole(batches.train(step), step).clone() for step in range(STEPS)]
    for begin, end in ((0, 2), (2, STEPS)):
        sitting = training(recipe, torch.float32, device)
        progress = load_state(tmp_path, sitting, {"recipe": "own"}) or Progress()
        assert progress.step == begin
        for step in range(begin, end):
            assert sitting(batches.train(step), step).equal(wanted[step])
        save_state(tmp_path, sitting, Progress(end), {"recipe": "own"})


def test_a_held_out_batch_changes_nothing(batches, recipe, device):
    step = training(recipe, torch.float32, device)
    before = [weight.detach().clone() for weight in step.model.parameters()]
    batch = batches.train(0)
    found = step.evaluate(batch, batch.topk)
    assert all(a.equal(b) for a, b in zip(before, step.model.parameters(), strict=True))
    torch.testing.assert_close(found, step(batch, 0))
