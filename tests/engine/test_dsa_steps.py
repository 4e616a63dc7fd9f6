"""Sparse attention with an indexer: buffers have the size of the step's rows, and old memory has no
effect."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.engine.build import Built
from tests.engine import dsv4
from tests.engine.dsa import BLOCK, FAMILIES, PAGE, TOPK, made, prompts_of, store
from tests.engine.harness import ROUNDING, assert_same, difference, greedy, run, text

OPTIONS = {"device": "cpu", "dtype": "float32", "load_format": "auto"}


def test_scores_are_as_wide_as_the_longest_row_that_runs(tmp_path: Path) -> None:
    """Less than the maximum length of a row, 1024 tokens."""
    store(tmp_path, BLOCK | FAMILIES["layers share"])
    built, shapes, score = made(tmp_path, "layers share", **OPTIONS), [], ops.paged_mqa_logits

    def scoring(*given, **options):
        logits = score(*given, **options)
        # The page table has one entry per page, not per token.
        assert given[3].shape[1] == 1024 // PAGE
        shapes.append(tuple(logits.shape))
        return logits

    prompts = prompts_of(3)[3:5]
    longest = max(map(len, prompts))
    with patch.object(ops, "paged_mqa_logits", scoring):
        run(built, prompts, greedy(3))
    assert shapes and all(TOPK < width <= longest + 3 for _, width in shapes)
    assert max(tokens for tokens, _ in shapes) == sum(map(len, prompts))


def test_two_starts_give_equal_bits(tmp_path: Path) -> None:
    """Unwritten memory is NaN, and other pages are allocated first."""
    store(tmp_path, BLOCK | FAMILIES["every layer selects"])
    prompts, found = prompts_of(4)[2:5], []
    for spare in (0, 3):
        built = made(tmp_path, "every layer selects", **OPTIONS)
        built.core.cache.allocator.take(spare)
        found.append(run(built, prompts, greedy(4), [PAGE, 50]))
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens and np.array_equal(one.logprobs, other.logprobs)


@pytest.fixture(scope="module", params=["layers share", "compressed"])
def sparse(request, tmp_path_factory) -> Built:
    """An engine whose layers select tokens or entries, without a prefix cache."""
    folder = tmp_path_factory.mktemp("sparse")
    if request.param == "compressed":
        return dsv4.made(folder, enable_prefix_caching=False)
    store(folder, BLOCK | FAMILIES[request.param])
    return made(folder, request.param, enable_prefix_caching=False, **OPTIONS)


def test_entries_behind_a_selection_are_not_read(sparse: Built) -> None:
    """Rows shorter than top-k next to a longer one: the rest of their lists refers to cells of an
    unowned page, which contains NaN."""
    select, replaced = ops.select_topk, list[int]()
    free = sparse.core.cache.allocator.free_pages[0]

    def selecting(*given) -> Tensor:
        cells, size = select(*given), given[-1]
        replaced.append(int((cells < 0).sum()))
        return cells.masked_fill(cells < 0, free * size)

    prompts = [text(n, length, 150) for n, length in enumerate((3, 20, 90))]
    wanted = run(sparse, prompts, greedy(2))
    with patch.object(ops, "select_topk", selecting):
        found = run(sparse, prompts, greedy(2))
    assert sum(replaced) > 0
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_nan_scores_of_one_row_stay_there(sparse: Built) -> None:
    """Rows select only cells that they may read, and do not affect each other."""
    score, select = ops.paged_mqa_logits, ops.select_topk

    def scoring(*given, **options) -> Tensor:
        row = given[4]
        return score(*given, **options).masked_fill((row == row.max()).unsqueeze(1), torch.nan)

    def selecting(logits: Tensor, seen: Tensor, topk: int, *given) -> Tensor:
        cells, (_, table, row, size) = select(logits, seen, topk, *given), given
        for own, count, pages in zip(
            cells.tolist(), seen.tolist(), table[row].tolist(), strict=True
        ):
            readable = {page * size + i for page in pages[: -(-count // size)] for i in range(size)}
            assert len(set(own[: min(count, topk)]) & readable) == min(count, topk)
        return cells

    prompts = [text(n, 80, 150) for n in range(3)]
    wanted = run(sparse, prompts, greedy(2))
    with patch.multiple(ops, paged_mqa_logits=scoring, select_topk=selecting):
        found = run(sparse, prompts, greedy(2))
    pairs = zip(found, wanted, strict=True)
    apart = [difference(one.logprobs, other.logprobs) for one, other in pairs]
    assert sum(off < ROUNDING for off in apart) == 2
    assert all(np.isfinite(one.logprobs).all() for one in found)
