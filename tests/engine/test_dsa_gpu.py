"""Sparse attention with an indexer on a GPU: graphs compared with eager steps, and with the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cairn import ops
from cairn.ops.sparse_mla.paged_mqa_logits import paged_mqa_logits_into
from tests.engine.dsa import (
    BLOCK,
    CASES,
    FAMILIES,
    FORMATS,
    GOLDENS,
    PAGE,
    golden,
    made,
    prompts_of,
    store,
    watched,
)
from tests.engine.harness import Trace, assert_same, greedy, run, text
from tests.engine.test_dsa_goldens import assert_golden, serve, shuffled
from tests.support import shows

pytestmark = pytest.mark.gpu


BOUNDS = {"auto": 1e-4, "fp8_ds": 0.02}
"""Tolerance of half of the rows, by dtype of the cache."""


def assert_near(got: list[Trace], wanted: list[Trace], bound: float = 0.02) -> None:
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
    assert np.median(np.concatenate(off)) < bound


@shows("deepseek_v32 glm_moe_dsa", "CUDA graph", "quantised KV")
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_what_steps_without_give(
    family: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    """Chunks, a cached prefix, and rows that end at different times."""
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
def test_gpu_logits_are_near_the_cpus(family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    options = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "load_format": "auto"}
    store(tmp_path, BLOCK | FAMILIES[family])
    prompts = prompts_of(2)
    host = run(made(tmp_path, family, device="cpu", **options), prompts, greedy(8))
    device = run(made(tmp_path, family, **options), prompts, greedy(8))
    # With nearly equal scores, another token may be the last selected one.
    assert_near(device, host, BOUNDS[kv_cache_dtype])


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
            # In bfloat16 a product of another shape rounds differently.
            assert np.median(np.abs(one.logprobs - other.logprobs)) < 0.05


@pytest.mark.parametrize("case", CASES)
def test_goldens(case: str) -> None:
    """The reference's results in float32, with its selected sets."""
    for expected in golden(GOLDENS / case).values():
        got, seen = serve(shuffled(case, device="cuda", disable_cuda_graph=True), expected)
        assert_golden(got, seen, 0, expected)


def most_followers(graph: torch.cuda.CUDAGraph) -> int:
    """The maximum number of graph nodes that depend on the same node; 1 if the graph is a chain."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes, most = (ctypes.c_void_p * count.value)(), 0
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    for node in nodes:
        count, given = ctypes.c_size_t(), (ctypes.c_void_p(node), None, None)
        assert driver.cuGraphNodeGetDependentNodes_v2(*given, ctypes.byref(count)) == 0
        most = max(most, count.value)
    return most


@contextlib.contextmanager
def captured() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """Context manager: collects the captured graphs."""
    graphs, kept = [], functools.partial(torch.cuda.CUDAGraph, keep_graph=True)

    def made_graph() -> torch.cuda.CUDAGraph:
        graphs.append(kept())
        return graphs[-1]

    with patch.object(torch.cuda, "CUDAGraph", made_graph):
        yield graphs


def test_the_indexer_runs_on_a_second_stream(tmp_path: Path) -> None:
    """With --indexer-stream second the graph forks, with equal results."""
    prompts, found, followers = [text(n, n, 250) for n in (5, 300, 613)], [], []
    for stream in ("same", "second"):
        with captured() as graphs:
            built = made(tmp_path, "every layer selects", dtype="float32", indexer_stream=stream)
            found.append(run(built, prompts, greedy(12)))
        followers.append(max(map(most_followers, graphs)))
    _all_same(*found)
    assert followers[1] > followers[0]


@contextlib.contextmanager
def definitions() -> Iterator[None]:
    """Context manager: the definitions compute selection and attention."""
    into = paged_mqa_logits_into.reference
    with (
        patch("cairn.ops.sparse_mla.paged_mqa_logits.paged_mqa_logits_into", into),
        patch.object(ops, "select_topk", ops.select_topk.reference),
        patch.object(ops, "sparse_mla", ops.sparse_mla.reference),
    ):
        yield


def test_far_behind_what_is_selected(tmp_path: Path) -> None:
    """At 64K tokens, of which a query selects 32: kernels compute the prefix, then kernels and
    definitions both compute the rest."""
    store(tmp_path, BLOCK | FAMILIES["every layer selects"] | {"max_position_embeddings": 1 << 17})
    options = {"dtype": "float32", "load_format": "auto", "disable_cuda_graph": True}
    options |= {"max_model_len": 1 << 17, "kv_cache_memory": "1GiB", "page_size": 64}
    built = made(tmp_path, "every layer selects", **options)
    prompt = text(11, (1 << 16) - 5, 250)
    run(built, [prompt], greedy(1), poisoned=False)
    found = []
    for computing in (contextlib.nullcontext, definitions):
        with computing(), watched(built) as seen:
            (got,) = run(built, [prompt], greedy(8), poisoned=False)
        assert got.cached >= len(prompt) - 64
        found.append((got, seen.selected))
    (one, chosen), (other, wanted) = found
    assert one.tokens == other.tokens
    assert np.median(np.abs(one.logprobs - other.logprobs).max(-1)) < 1e-4
    assert len(chosen) == len(wanted) > 3 * 8
    apart = sum(a != b for a, b in zip(chosen.values(), wanted.values(), strict=True))
    assert apart <= len(chosen) // 50
