"""Sparse attention by an indexer on a GPU: graphs against eager steps, and against the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engine.dsa import CASES, FAMILIES, FORMATS, GOLDENS, PAGE, golden, made, prompts_of
from tests.engine.harness import Trace, assert_same, greedy, run, text
from tests.engine.test_dsa_goldens import assert_golden, serve, shuffled
from tests.support import shows

pytestmark = pytest.mark.gpu


def assert_near(got: list[Trace], wanted: list[Trace]) -> None:
    """As exact as products of other shapes allow; of keys in 8 bits a rounding may choose another
    number, and that another token far down in a selection. What follows another token is not
    compared."""
    off: list[np.ndarray] = []
    for one, other in zip(got, wanted, strict=True):
        assert np.isfinite(one.logprobs).all()
        pairs = zip(one.tokens, other.tokens, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.tokens) - 1)
        off.append(np.abs(one.logprobs - other.logprobs).max(-1)[: same + 1])
    print("half of the rows within", np.median(np.concatenate(off)), [len(own) for own in off])
    assert np.median(np.concatenate(off)) < 0.02


@shows("deepseek_v32 glm_moe_dsa", "CUDA graph", "quantised KV")
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_what_steps_without_give(
    family: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    """In chunks, with a cached prefix, with rows that end at different times."""
    options = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    graphs = made(tmp_path, family, **options)
    eager = made(tmp_path, family, disable_cuda_graph=True, **options)
    assert graphs.runner.graphs is not None and eager.runner.graphs is None
    same = assert_near if kv_cache_dtype == "fp8_ds" else _all_same
    prompts = prompts_of(1)
    rng = random.Random(3)
    for _ in range(2):
        budgets = [rng.choice([1, 7, PAGE, 100, 700]) for _ in range(5)]
        same(run(graphs, prompts, greedy(20), budgets), run(eager, prompts, greedy(20), budgets))
    assert len(graphs.runner.graphs._captured) > 0
    assert graphs.runner.prefill_graphs is not None and graphs.runner.prefill_graphs._captured


def _all_same(got: list[Trace], wanted: list[Trace]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_near_the_cpu(family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    options = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    prompts = prompts_of(2)
    host = run(made(tmp_path, family, device="cpu", **options), prompts, greedy(8))
    device = run(made(tmp_path, family, **options), prompts, greedy(8))
    (assert_near if kv_cache_dtype == "fp8_ds" else _all_same)(device, host)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_a_replayed_graph_reads_lengths_when_it_runs(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Captured with short rows, replayed with long ones and then with short ones again."""
    options = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    graphs = made(tmp_path, "every layer selects", **options)
    eager = made(tmp_path, "every layer selects", disable_cuda_graph=True, **options)
    for lengths in ((4, 1), (700, 33), (2, 900), (31, 32)):
        prompts = [text(length, length, 250) for length in lengths]
        got, wanted = (run(built, prompts, greedy(6)) for built in (graphs, eager))
        for one, other in zip(got, wanted, strict=True):
            # In bfloat16 another shape of a product rounds otherwise.
            assert np.median(np.abs(one.logprobs - other.logprobs)) < 0.05


@pytest.mark.parametrize("case", CASES)
def test_goldens(case: str) -> None:
    """What the reference implementation gives, in float32, selected sets included."""
    for expected in golden(GOLDENS / case).values():
        got, seen = serve(shuffled(case, device="cuda", disable_cuda_graph=True), expected)
        assert_golden(got, seen, 0, expected)
