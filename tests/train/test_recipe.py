"""Recipes: the shipped ones, and errors in files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby

import pytest

from cairn.errors import BadConfig
from cairn.models.registry import load_spec
from cairn.train.recipe import RECIPES, Rates, dense, embedded, from_json, load_recipe, smoke
from tests.specs import kinds, parameter_count


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_fit_their_model(name):
    recipe = load_recipe(name)
    spec = load_spec(recipe.config)
    assert 2 * parameter_count(spec) <= 16_000_000
    assert all(stage.length % (spec.chunk_size or 64) == 0 for stage in recipe.stages)
    assert (
        {1 << 15, 1 << 16}
        <= {stage.slots for stage in recipe.stages}
        <= {1 << 15, 1 << 16, 1 << 17}
    )
    assert recipe.stages[-1].length >= 16384


def test_the_dense_twin_differs_in_attention_alone():
    twin, own = load_spec(dense().config), load_spec(embedded().config)
    assert set(kinds(twin)) == {"full"}
    assert kinds(own) == ["window"] * 2 + ["hils"] * 3
    assert (twin.hidden_size, twin.num_layers) == (own.hidden_size, own.num_layers)
    same = {"config": None, "stages": dense().stages, "page_weight": 0.0}
    assert replace(dense(), **same) == replace(embedded(), **same)
    assert {s.length for s in embedded().stages} >= {s.length for s in dense().stages}


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_holds_a_whole_recipe(name, tmp_path):
    recipe = smoke(load_recipe(name))
    path = tmp_path / "recipe.json"
    path.write_text(recipe.as_json())
    assert load_recipe(str(path)) == recipe


def test_rates_rise_and_fall():
    rates = Rates(warmup=10, decay=0.5, least=0.1)
    factors = [rates.factor(step, 100) for step in range(100)]
    assert factors[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert factors[30] == 1
    assert factors[75] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(0.1)


def test_every_step_has_a_stage():
    recipe = embedded()
    stages = [recipe.stage_of(step) for step in range(recipe.steps)]
    runs = [(stage, len(list(steps))) for stage, steps in groupby(stages)]
    assert [stage for stage, _ in runs] == list(recipe.stages)
    shares = [count / recipe.steps for _, count in runs]
    assert shares == pytest.approx([stage.share for stage in recipe.stages], abs=1e-3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step": 3}, "no field 'step'. Did you mean 'steps'?"),
        ({"steps": "many"}, "steps is 'many'"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": True}, "steps is True"),
        ({"stages": []}, "shares"),
        ({"stages": 1}, "not a list"),
        ({"stages": [{"share": 1}]}, "a stage needs 'length'"),
        ({"checkpoint_steps": 7}, "multiple of log_steps"),
        ({"tokenizer": "words"}, "tokenizer is 'words'"),
        ({"rates": {"warm": 3}}, "Did you mean 'warmup'?"),
    ],
)
def test_errors_in_a_recipe_file_are_named(change, told):
    text = json.dumps({**json.loads(embedded().as_json()), **change})
    with pytest.raises(BadConfig, match=told.replace("?", r"\?")):
        from_json(text)


def test_an_unknown_name_is_refused():
    with pytest.raises(BadConfig, match="Did you mean 'embedded'"):
        load_recipe("embeded")
