"""Compressed attention and hyper-connections on a GPU: graphs, eager steps, and the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engine.dsv4 import CONFIG, PAGE, Reference, made, saved
from tests.engine.harness import assert_same, engine, greedy, run, text
from tests.support import shows

pytestmark = pytest.mark.gpu

LENGTHS = (3, 19, 20, 33, 5 * PAGE, 130, 413)


def prompts_of(seed: int) -> list[list[int]]:
    """Around windows and pages, and far beyond top-k."""
    return [text(seed + i, length, 150) for i, length in enumerate(LENGTHS)]


@shows("deepseek_v4", "CUDA graph")
def test_graphs_give_what_steps_without_give(tmp_path: Path) -> None:
    """Chunks, a cached prefix, and rows that end at different times."""
    graphs = made(tmp_path, device="cuda")
    eager = made(tmp_path, device="cuda", disable_cuda_graph=True)
    assert graphs.runner.graphs is not None and eager.runner.graphs is None
    prompts, rng = prompts_of(1), random.Random(3)
    for _ in range(2):
        budgets = [rng.choice([1, 7, PAGE, 100, 700]) for _ in range(5)]
        found = (run(built, prompts, greedy(20), budgets) for built in (graphs, eager))
        for got, wanted in zip(*found, strict=True):
            assert_same(got, wanted)
    assert len(graphs.runner.graphs._captured) > 0


def test_gpu_logits_are_near_the_cpus(tmp_path: Path) -> None:
    saved(tmp_path)
    given = {"page_size": PAGE, "kv_cache_memory": "16MiB"}
    found = (
        run(engine(str(tmp_path), device=device, **given), prompts_of(2), greedy(8))
        for device in ("cuda", "cpu")
    )
    for got, wanted in zip(*found, strict=True):
        assert_same(got, wanted)


def test_a_replayed_graph_reads_lengths_when_it_runs(tmp_path: Path) -> None:
    """Captured with short rows, replayed with long ones and then with short ones again."""
    graphs = made(tmp_path, device="cuda", dtype="bfloat16")
    eager = made(tmp_path, device="cuda", dtype="bfloat16", disable_cuda_graph=True)
    for lengths in ((4, 1), (700, 33), (2, 900), (31, 32)):
        prompts = [text(length, length, 150) for length in lengths]
        got, wanted = (run(built, prompts, greedy(6)) for built in (graphs, eager))
        for one, other in zip(got, wanted, strict=True):
            # In bfloat16 a product of another shape rounds differently.
            assert np.median(np.abs(one.logprobs - other.logprobs)) < 0.05


def test_released_head_sizes_equal_the_formulas(tmp_path: Path) -> None:
    """Heads of 512 values, index keys of 128, a window of 128."""
    changes = {
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "sliding_window": 128,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    }
    reference = Reference(CONFIG | changes, saved(tmp_path, **changes))
    given = {"device": "cuda", "page_size": 64, "kv_cache_memory": "256MiB"}
    prompts = [text(n, n, 150) for n in (5, 127, 128, 300)]
    params = greedy(4, prompt_logprobs=True)
    for prompt, got in zip(
        prompts, run(engine(str(tmp_path), **given), prompts, params, [97]), strict=True
    ):
        logits = reference.logits([*prompt, *got.tokens[:-1]])
        wanted = logits.log_softmax(-1).numpy()
        bound = 1e-4 * logits.abs().max().item()
        assert np.abs(got.prompt_logprobs - wanted[: len(prompt) - 1]).max() < bound
        assert np.abs(got.logprobs - wanted[len(prompt) - 1 :]).max() < bound
