"""The trained model equals the served one: logits, tensor names, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.errors import BadConfig
from cairn.models.registry import load_spec
from cairn.train.checkpoint import export
from cairn.train.model import TrainedModel, check_names, losses
from cairn.train.recipe import Recipe, dense, embedded, smoke
from cairn.train.tasks import ANSWER
from cairn.train.tokens import make_vocabulary
from tests.engine.harness import engine, greedy, run
from tests.specs import hils_of

TOKENS = 180
"""Twelve pages of 16 slots, without their landmarks."""


def small(recipe: Recipe, **changes: object) -> TrainedModel:
    """Random weights in a checkpoint's format, large enough that every part has an effect."""
    model = TrainedModel(load_spec({**smoke(recipe).config, **changes}), seed=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lmk_q_proj.1.weight")):
                weight.mul_(20)
            if "embed" in name:
                weight.mul_(50)
            if "norm" in name:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
            weight.copy_(weight.bfloat16())
    return model


def logprobs(model: TrainedModel, ids: list[int], topk: int) -> np.ndarray:
    page = model.page_size - 1 if model.spec.landmarks else model.page_size
    padded = ids + [0] * (-len(ids) % page)
    with torch.no_grad():
        hidden = model(torch.tensor([padded]), topk, torch.float32).hidden[0, : len(ids)]
        return (hidden @ model.table.T).log_softmax(-1).numpy()


CASES = {
    "embedded": (embedded(), {}),
    "no softmax1": (embedded(), {"enable_softmax1": False}),
    "landmarks seen": (embedded(), {"mask_lmk_token": False, "sliding_window": 21}),
    "one layer in two": (embedded(), {"num_swa_layers": 0, "full_attn_interleave": 2}),
    "no position": (embedded(), {"apply_hils_rope": False, "tie_word_embeddings": False}),
    "dense": (dense(), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    recipe, changes = CASES[case]
    model = small(recipe, **changes)
    config = {**smoke(recipe).config, **changes}
    export(tmp_path, model, Recipe(config, 1, recipe.stages), make_vocabulary("bytes", ()))
    ids = np.random.default_rng(0).integers(0, 256, TOKENS).tolist()
    built = engine(str(tmp_path), kv_cache_memory="4MiB")
    (got,) = run(built, [ids], greedy(1, prompt_logprobs=True), budgets=[50])
    served = np.concatenate([got.prompt_logprobs, got.logprobs[:1]])
    own = logprobs(model, ids, topk=2)
    scale = np.abs(own).max()
    assert np.abs(own - served).max() < 2e-4 * scale
    if hils_of(model.spec) is not None:
        # Pages beyond the window matter in this model, so that the comparison can fail.
        assert np.abs(logprobs(model, ids, topk=1) - served).max() > 1e-2 * scale


@pytest.mark.parametrize("recipe", [embedded(), dense()])
def test_parameters_have_the_published_names(recipe: Recipe) -> None:
    with torch.device("meta"):
        check_names(TrainedModel(load_spec(recipe.config), 0))


def test_every_parameter_learns() -> None:
    model = small(embedded())
    ids = torch.randint(0, 256, (2, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    result = model(ids[:, :-1], 2, torch.float32)
    classes = torch.zeros_like(ids[:, 1:])
    classes[:, -20:] = ANSWER
    metrics = losses(
        *(result.hidden.flatten(0, 1), model.table, result.page_mass.flatten()),
        *(ids[:, 1:].flatten(), classes.flatten()),
    )
    text, answer, right, page_mass = metrics.unbind()
    assert 0 < page_mass < 1
    assert 0 <= right <= 1
    (text + answer + page_mass).backward()
    assert [n for n, w in model.named_parameters() if w.grad is None or not w.grad.any()] == []


def test_bfloat16_is_near(tmp_path: Path) -> None:
    model = TrainedModel(load_spec(smoke(embedded()).config), seed=0)
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, rounded = (
            model(ids, 2, kind).hidden.float() for kind in (torch.float32, torch.bfloat16)
        )
    assert (exact - rounded).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "olmo_hils", "tie_word_embeddings": False},
        {"enable_prior_query": False},
        {"enable_chunk_pooling": True},
        {"shared_q_c": True},
        {"lmk_q_lora_dim": -1},
        {"enable_lmk_q_proj": False},
        {"layerwise_qk_norm": True},
        {"use_hope": True, "enable_inrange_rope": False},
        {"insert_landmarks": False, "adjust_lmk_pos": False},
        {"attention_bias": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_models_that_cannot_be_trained_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadConfig, match="not trained here"):
        small(embedded(), **changes)
