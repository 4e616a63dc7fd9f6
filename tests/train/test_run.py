"""Whole runs: they learn, resume after an interruption, and write a model that can be served."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.cli.main import main
from cairn.errors import BadConfig
from cairn.train.checkpoint import STATE
from cairn.train.recipe import Rates, Recipe, Stage, dense, smoke
from cairn.train.run import Line, Outcome, Run, train
from cairn.train.step import METRICS


@pytest.fixture
def go(library: Path, tmp_path: Path) -> Callable[..., tuple[Outcome, list[Line]]]:
    def call(recipe: Recipe, name: str = "out", **options) -> tuple[Outcome, list[Line]]:
        lines: list[Line] = []
        run = Run(tmp_path / name, (library,), "cpu", **options)
        return train(recipe, run, lines.append), lines

    return call


def numbers(lines: list[Line]) -> list[list[float]]:
    return [[line[name] for name in ("step", "length", "rate", *METRICS)] for line in lines]


def test_a_run_that_was_cut_gives_the_same_losses(go, recipe, tmp_path):
    _, whole = go(recipe, "whole")
    outcome, first = go(recipe, "cut", max_seconds=0)
    assert not outcome.finished
    assert len(first) == 1
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    outcome, rest = go(recipe, "cut")
    assert outcome.finished
    assert numbers([*first, *rest]) == numbers(whole)
    assert [line["step"] for line in outcome.progress.history] == list(range(1, 9))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(a[name].equal(b[name]) for name in a)


def test_the_seed_decides(go, recipe):
    runs = [
        numbers(go(replace(recipe, steps=2, seed=seed), str(i))[1])
        for i, seed in enumerate((0, 0, 1))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_state_of_another_run_is_refused(go, recipe, tmp_path, library):
    go(recipe, max_seconds=0)
    with pytest.raises(BadConfig, match="another recipe.*Remove"):
        go(replace(recipe, seed=1))
    (tmp_path / "more").mkdir()
    for path in library.iterdir():
        (tmp_path / "more" / path.name).write_text(path.read_text() + "more\n")
    with pytest.raises(BadConfig, match="another data"):
        train(recipe, Run(tmp_path / "out", (tmp_path / "more",), "cpu"), lambda line: None)
    (tmp_path / "out" / STATE).write_bytes(b"rubbish")
    with pytest.raises(BadConfig, match="cannot be read"):
        go(recipe)


def test_a_model_is_not_overwritten(go, recipe, tmp_path):
    go(recipe)
    go(recipe)
    (tmp_path / "out" / STATE).unlink()
    with pytest.raises(BadConfig, match="holds a model already"):
        go(recipe)


def test_training_reduces_the_loss(go, recipe):
    stage = Stage(1.0, 128, 8, (2,), 0.5)
    longer = replace(recipe, steps=40, stages=(stage,), log_steps=20, checkpoint_steps=40)
    _, lines = go(replace(longer, rates=Rates(warmup=5)))
    assert lines[0]["text"] - lines[-1]["text"] > 0.5
    assert lines[-1]["tokens_per_second"] > 0


def test_pressure_takes_attention_from_the_pages(go, recipe):
    stage = Stage(1.0, 256, 4, (8,), 0.5)
    base = replace(recipe, steps=12, stages=(stage,), log_steps=12, checkpoint_steps=12)
    base = replace(base, rates=Rates(warmup=1))
    free, pressed = (go(replace(base, page_weight=w), str(w))[0] for w in (0.0, 30.0))
    assert pressed.held_out["page_mass"] < 0.7 * free.held_out["page_mass"]


def test_a_trained_vocabulary(go, recipe, tmp_path):
    go(replace(recipe, steps=1, tokenizer=280))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 280
    llm = LLM(str(tmp_path / "out"), kv_cache_memory="4MiB", device="cpu")
    try:
        (got,) = llm.generate(["stone path"], SamplingParams(max_tokens=3), use_tqdm=False)
        assert len(got.outputs[0].token_ids) == 3
    finally:
        llm.shutdown()


def test_the_dense_twin_runs(go):
    recipe = replace(smoke(dense()), steps=1)
    outcome, lines = go(recipe)
    assert outcome.finished
    assert lines[0]["page_mass"] == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"stages": (Stage(1.0, 100, 1, (2,), 0.5),)}, "length of 100 slots"),
        ({"rates": Rates(matrices=1e30, warmup=1)}, "not a number at step"),
    ],
)
def test_impossible_training_options_are_refused(go, recipe, change, told):
    with pytest.raises(BadConfig, match=told):
        go(replace(recipe, **change))


def test_the_shipped_command_in_small(library, tmp_path, capfd):
    """All stages and kinds of layers of the shipped recipe; then the folder is a MODEL."""
    arguments = ["train", "--recipe", "embedded", "--smoke", "--data", str(library)]
    arguments += ["--output", str(tmp_path), "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--max-minutes", "1e-9"])
    assert end.value.code == 3
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    shown = capfd.readouterr()
    assert "held-out text" in shown.out
    assert "tokens/s" in shown.err
    assert "right" in shown.err
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == record["recipe"]["steps"] == 32
    assert record["history"][-1]["step"] == 32
    with pytest.raises(SystemExit) as end:
        main(
            [
                "generate",
                str(tmp_path),
                "--prompt",
                "stone",
                "--max-tokens",
                "4",
                "--device",
                "cpu",
                "--kv-cache-memory",
                "4MiB",
            ]
        )
    assert end.value.code == 0
