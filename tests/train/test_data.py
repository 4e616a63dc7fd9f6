"""Batches: exact lengths, questions after their facts, no held-out text."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from cairn.errors import BadConfig
from cairn.train.data import Batches, load_corpus, read_files
from cairn.train.recipe import Stage
from cairn.train.tasks import ANSWER, IGNORED

PAGE = (15, 16)


@pytest.fixture
def batches(library, recipe) -> Batches:
    return Batches(recipe, *load_corpus([library], recipe.tokenizer, 300), PAGE)


def test_a_batch_follows_from_seed_and_step(batches, recipe):
    seeded = Batches(replace(recipe, seed=1), batches.corpus, batches.vocabulary, PAGE)
    first, again, *others = (
        own.train(step) for own, step in ((batches, 5), (batches, 5), (batches, 6), (seeded, 5))
    )
    assert np.array_equal(first.ids, again.ids)
    assert np.array_equal(first.classes, again.classes)
    assert not any(np.array_equal(first.ids, other.ids) for other in others)


def test_sequences_are_whole_pages_and_a_target(batches, recipe):
    for step in range(recipe.steps):
        stage, batch = recipe.stage_of(step), batches.train(step)
        assert batch.ids.shape == (stage.sequences, stage.length // 16 * 15 + 1)
        assert batch.classes.shape == batch.ids.shape
        assert batch.topk in stage.topk


def test_every_answer_is_stated_before_it(batches):
    stage = Stage(1.0, 4096, 8, (2,), 1.0)
    batch = batches._make(stage, batches.corpus.train, 0)
    answers = 0
    for ids, classes in zip(batch.ids, batch.classes, strict=True):
        text = bytes(ids.astype(np.uint8)).decode()
        starts = np.flatnonzero((classes == ANSWER) & (np.roll(classes, 1) != ANSWER))
        for start in starts:
            (value,) = re.findall(r"\d+", text[start : text.index("\n", start)])[-1:]
            assert value in text[:start]
            answers += 1
    assert answers > 20


def test_text_is_what_is_left_of_the_lines(batches):
    batch = batches._make(Stage(1.0, 1024, 4, (2,), 1.0), batches.corpus.train, 0)
    for ids, classes in zip(batch.ids, batch.classes, strict=True):
        kept = bytes(ids[classes == 0].astype(np.uint8))
        assert kept in bytes(batches.corpus.train)
        assert (classes == IGNORED).any()


def test_held_out_files_are_not_trained_on(library, recipe):
    corpus, _ = load_corpus([library], recipe.tokenizer, 300)
    texts = [text.encode() for _, text in read_files(library)]
    held = [text for text in texts if text in bytes(corpus.held_out)]
    trained = [text for text in texts if text in bytes(corpus.train)]
    assert held
    assert trained
    assert len(held) + len(trained) == len(texts) == corpus.files


def test_a_folder_without_enough_text_is_refused(tmp_path, recipe):
    (tmp_path / "a.txt").write_text("short\n")
    (tmp_path / "b.bin").write_bytes(b"\xff" * 10_000)
    with pytest.raises(BadConfig, match="hold 7 tokens in 1 files"):
        load_corpus([tmp_path], recipe.tokenizer, 300)
    with pytest.raises(BadConfig, match="not a folder"):
        load_corpus([tmp_path / "none"], recipe.tokenizer, 300)
