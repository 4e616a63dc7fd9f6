"""A folder of training text, and a recipe that takes seconds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from cairn.train.recipe import Recipe, Stage, embedded, smoke

WORDS = "stone path river light under over walks finds every little grey cold return hills".split()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 files of learnable lines."""
    folder = tmp_path_factory.mktemp("library")
    rng = random.Random(0)
    for i in range(60):
        lines = [" ".join(rng.choices(WORDS, k=9)) for _ in range(30)]
        (folder / f"{i:02}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def recipe() -> Recipe:
    """A small version of the shipped recipe, in two stages."""
    small = smoke(embedded())
    stages = (Stage(0.5, 128, 2, (2, 8), 0.9), Stage(0.5, 256, 1, (2,), 0.5))
    return replace(small, steps=8, stages=stages, log_steps=1, checkpoint_steps=4)
