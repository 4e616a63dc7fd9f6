"""Layers with a recurrent state on a GPU: invariance to graphs, chunks, batches and prefix cache,
and agreement with the CPU and the reference."""

from __future__ import annotations

import random

import pytest

from cairn.engine.build import Built
from tests.engine.harness import Trace, difference, greedy, run, text
from tests.engine.qwen35 import RECURRENT, engine, golden, lengths, serve
from tests.engine.test_qwen35_goldens import BOUND, logprobs

pytestmark = pytest.mark.gpu
LENGTHS = (1, 3, 16, 17, 63, 64, 65, 130, 300)
"""Lengths around the token-by-token path, and around chunk borders."""
NEAR = 12 * BOUND
"""Tolerance of log-probabilities, whose scale is about 12."""


def made(case: str, **options) -> Built:
    """An engine on the device."""
    given = {"device": "cuda", "max_num_seqs": 12, "kv_cache_memory": "32MiB"}
    return engine(case, **given | options)


def prompts_of(seed: int) -> list[list[int]]:
    return [text(seed + i, length, 140) for i, length in enumerate(LENGTHS)]


def assert_near(got: list[Trace], wanted: list[Trace]) -> None:
    """Equal tokens. Products of other shapes round differently, which small outputs of the delta
    rule magnify."""
    for one, other in zip(got, wanted, strict=True):
        assert one.tokens == other.tokens
        assert difference(one.logprobs, other.logprobs) < NEAR


@pytest.mark.parametrize("case", RECURRENT)
def test_graphs_give_what_steps_without_give(case: str) -> None:
    """Chunks, a cached prefix, and rows that end at different times."""
    graphs, eager = made(case), made(case, disable_cuda_graph=True)
    assert graphs.runner.graphs is not None and eager.runner.graphs is None
    rng = random.Random(3)
    for _ in range(2):
        budgets = [rng.choice([1, 7, 64, 100, 700]) for _ in range(5)]
        got, wanted = (run(built, prompts_of(1), greedy(12), budgets) for built in (graphs, eager))
        assert_near(got, wanted)
        assert [trace.cached for trace in got] == [trace.cached for trace in wanted]
    assert graphs.runner.graphs._captured
    assert graphs.runner.prefill_graphs is not None and graphs.runner.prefill_graphs._captured


@pytest.mark.parametrize("case", RECURRENT)
def test_gpu_logits_are_near_the_cpus(case: str) -> None:
    host = run(engine(case, max_num_seqs=12), prompts_of(2), greedy(8))
    assert_near(run(made(case), prompts_of(2), greedy(8)), host)


@pytest.mark.parametrize("case", RECURRENT[:1])
def test_chunks_batches_and_cached_prefixes_change_nothing(case: str) -> None:
    alone = made(case, enable_prefix_caching=False)
    wanted = [serve(alone, [prompt], 8)[0] for prompt in prompts_of(3)]
    built = made(case)
    assert_near(serve(built, prompts_of(3), 8), wanted)
    warm = serve(built, prompts_of(3), 8, budget=64)
    assert_near(warm, wanted)
    assert sum(trace.cached for trace in warm) > 0
    assert_near(serve(made(case), prompts_of(3), 8, budget=40), wanted)


@pytest.mark.parametrize("case", RECURRENT)
def test_goldens(case: str) -> None:
    """The results of the reference implementation."""
    for length in lengths(case):
        reference = golden(case, length)
        built = made(case, max_num_seqs=1, enable_prefix_caching=False)
        tokens = reference["greedy_ids"].tolist()
        (got,) = serve(built, [reference["input_ids"].tolist()], len(tokens))
        assert got.tokens == tokens
        scale = float(reference["prefill_logits"].abs().max())
        decode = logprobs(reference["decode_logits"])[: len(tokens)]
        assert difference(got.logprobs, decode) < BOUND * scale
