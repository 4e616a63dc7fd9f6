"""Saves and restores the state of a training run, and exports its model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cairn.errors import BadConfig
from cairn.train.data import Corpus
from cairn.train.model import TrainedModel, check_names
from cairn.train.recipe import Recipe
from cairn.train.step import TrainStep
from cairn.train.tokens import Vocabulary

STATE = "training.safetensors"
"""File of float32 weights and optimizer state, from which a run resumes."""
RUN = "training.json"
"""File of the recipe, the data's checksum and the log."""


@dataclass(slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: number of steps done.
        seconds: total training time, over all calls.
        history: lines of the log.
    """

    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def fingerprint(recipe: Recipe, corpus: Corpus) -> dict[str, str]:
    """Fingerprint of recipe and data, which a resumed run must share."""
    return {"recipe": recipe.as_json(), "data": corpus.checksum}


def save_state(folder: Path, training: TrainStep, progress: Progress, run: dict[str, str]) -> None:
    """Write the state atomically: the previous one stays until the new one is complete."""
    tensors = _state(training)
    told = run | {"progress": json.dumps([progress.step, progress.seconds, progress.history])}
    partial = folder / f"{STATE}.partial"
    partial.write_bytes(save({n: t.detach().contiguous().cpu() for n, t in tensors.items()}, told))
    partial.replace(folder / STATE)


def load_state(folder: Path, training: TrainStep, run: dict[str, str]) -> Progress | None:
    """Restore a saved state; returns None if there is none.

    Raises:
        BadConfig: the state belongs to another recipe or other data, or cannot be read.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    remedy = f"Remove {path} to start again, or choose another output folder"
    tensors = _state(training)
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            for name, value in run.items():
                if told.get(name) != value:
                    raise BadConfig(f"{path} is a state of another {name}", remedy)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise BadConfig(f"{path} cannot be read: {error}", remedy) from None
    return Progress(*json.loads(told["progress"]))


def _state(training: TrainStep) -> dict[str, Tensor]:
    weights = {f"weight.{name}": w for name, w in training.model.named_parameters()}
    return weights | training.optimizer.state()


def export(
    folder: Path, model: TrainedModel, recipe: Recipe, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Write the model in the published names: config.json, model.safetensors, tokenizer files.

    Returns:
        The content of config.json.
    """
    check_names(model)
    config = dict(recipe.config) | {"vocab_size": vocabulary.size}
    kind = getattr(torch, model.spec.dtype)
    weights = {
        name: weight.detach().to(kind).contiguous().cpu()
        for name, weight in model.named_parameters()
    }
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    vocabulary.save(folder, model.spec.max_model_len)
    return config


def write_run(
    folder: Path, recipe: Recipe, corpus: Corpus, progress: Progress, held_out: dict[str, float]
) -> None:
    """Write the record of the run."""
    record = {
        "recipe": json.loads(recipe.as_json()),
        "data": {
            "files": corpus.files,
            "characters": corpus.characters,
            "checksum": corpus.checksum,
        },
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "held_out": held_out,
        "history": progress.history,
    }
    (folder / RUN).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
