"""Sparse attention by an indexer: a step takes what its rows need; no old memory shows in it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np

from cairn import ops
from tests.engine.dsa import BLOCK, FAMILIES, PAGE, TOPK, made, prompts_of, store
from tests.engine.harness import greedy, run

OPTIONS = {"device": "cpu", "dtype": "float32", "load_format": "auto"}


def test_scores_are_as_wide_as_the_longest_row_that_runs(tmp_path: Path) -> None:
    """Not as a row may become: 1024 tokens."""
    store(tmp_path, BLOCK | FAMILIES["layers share"])
    built, shapes, score = made(tmp_path, "layers share", **OPTIONS), [], ops.paged_mqa_logits

    def scoring(*given, **options):
        logits = score(*given, **options)
        shapes.append(tuple(logits.shape))
        return logits

    prompts = prompts_of(3)[3:5]
    longest = max(map(len, prompts))
    with patch.object(ops, "paged_mqa_logits", scoring):
        run(built, prompts, greedy(3))
    assert shapes and all(TOPK < width <= longest + 3 for _, width in shapes)
    assert max(tokens for tokens, _ in shapes) == sum(map(len, prompts))


def test_two_starts_give_equal_bits(tmp_path: Path) -> None:
    """Memory that nobody has written is NaN, and other pages are free first."""
    store(tmp_path, BLOCK | FAMILIES["every layer selects"])
    prompts, found = prompts_of(4)[2:5], []
    for spare in (0, 3):
        built = made(tmp_path, "every layer selects", **OPTIONS)
        built.core.cache.allocator.take(spare)
        found.append(run(built, prompts, greedy(4), [PAGE, 50]))
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens and np.array_equal(one.logprobs, other.logprobs)
