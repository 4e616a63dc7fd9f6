"""Decode steps as CUDA graphs, compared with eager steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from cairn import LLM, SamplingParams
from cairn.engine.build import Built
from cairn.runner.graphs import Ending, buckets_up_to
from cairn.runner.logprobs import MAX_GRAPH_LOGPROBS
from tests.engine.harness import Trace, engine, occupy, run
from tests.support import shows

MAX_ROWS = 64
BUCKETS = [bucket for bucket in buckets_up_to(MAX_ROWS + 8) if bucket <= MAX_ROWS]
ENDINGS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "top_p": 0.95, "seed": 3},
    "logits": {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 0},
    "greedy, reported": {"temperature": 0, "logprobs": 3},
    "drawn, reported": {"temperature": 0.8, "top_p": 0.95, "seed": 3, "logprobs": 20},
}
"""What is computed from the logits: each kind is a separate graph."""
CASES = ["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"]


@pytest.mark.parametrize("most", [1, 2, 3, 9, 64, 72, 73, 500])
def test_buckets_reach_and_waste_little(most):
    found = buckets_up_to(most)
    assert list(found) == sorted(set(found)) and found[0] == 1
    assert found[-1] >= most
    assert all(b <= most for b in found[:-1])
    assert all(b <= max(2 * a, a + 8, a * 5 // 4) for a, b in itertools.pairwise(found))


def text(rng: random.Random, length: int, vocab: int = 200) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


@pytest.fixture(scope="module", params=CASES)
def pair(request) -> tuple[Built, Built]:
    """The same model with graphs and without."""
    options = {"max_num_seqs": MAX_ROWS, "kv_cache_memory": "96MiB", "device": "cuda"}
    with_graphs = engine(request.param, enable_prefix_caching=False, **options)
    assert with_graphs.runner.graphs is not None
    eager = engine(request.param, enable_prefix_caching=False, disable_cuda_graph=True, **options)
    assert eager.runner.graphs is None
    return with_graphs, eager


def lengths_of(kind: str, rng: random.Random, rows: int, size: int) -> list[int]:
    """Prompts within the window, over a few pages, over many; or all of which end a page
    together."""
    if kind == "together":
        return [(size - 1) * rng.randrange(1, 9) - 3 for _ in range(rows)]
    longest = {"short": 2 * size, "medium": 12 * size, "long": 45 * size}[kind]
    return [rng.randrange(longest // 4, longest) for _ in range(rows)]


def assert_same(got: Sequence[Trace], wanted: Sequence[Trace]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)


@shows("hils", "CUDA graph")
@pytest.mark.gpu
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_bucket_at_several_lengths(pair, bucket):
    """Rows complete pages at different times, end at different times, and leave padding."""
    with_graphs, eager = pair
    rng = random.Random(bucket)
    size = eager.config.page_size
    # Landmarks of rows that complete a page fill the bucket.
    rows = bucket - bucket // 8
    for ending, kind in zip(
        ("greedy", "drawn", "logits", "greedy, reported", "drawn, reported"),
        ("short", "medium", "long", "together", "short"),
        strict=True,
    ):
        prompts = [text(rng, n) for n in lengths_of(kind, rng, rows, size)]
        params = [
            SamplingParams(max_tokens=2 * size + i % 5, ignore_eos=True, **ENDINGS[ending])
            for i in range(rows)
        ]
        assert_same(run(with_graphs, prompts, params), run(eager, prompts, params))
    assert any(key[0] == bucket for key in with_graphs.runner.graphs._captured)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("wanted", "ending"),
    [
        ((None, 5, 0), Ending.REPORT),
        ((MAX_GRAPH_LOGPROBS, None, None), Ending.REPORT),
        ((MAX_GRAPH_LOGPROBS + 1, 5, None), Ending.LOGITS),
        ((-1, 5, None), Ending.LOGITS),
    ],
)
def test_graphs_report_log_probabilities(pair, wanted, ending):
    """Rows that request as many alternatives as others, fewer, or none, some with min_tokens;
    greedy or sampled."""
    with_graphs, eager = pair
    rng = random.Random(7)
    prompts = [text(rng, n) for n in (30, 200, 70)]
    for kind in ("greedy", "drawn"):
        params = [
            SamplingParams(
                max_tokens=20, ignore_eos=True, logprobs=count, min_tokens=5 * i, **ENDINGS[kind]
            )
            for i, count in enumerate(wanted)
        ]
        with_graphs.runner.graphs._captured.clear()
        with_graphs.runner.graphs._last = None
        assert_same(run(with_graphs, prompts, params), run(eager, prompts, params))
        assert (4, ending, False) in with_graphs.runner.graphs._captured


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, MAX_ROWS])
def test_rows_that_all_close_a_page_at_once(pair, rows):
    with_graphs, eager = pair
    size = eager.config.page_size
    rng = random.Random(rows)
    # Short enough that one step prefills all of them, so that the rows stay together.
    prompts = [text(rng, 2 * (size - 1) - 3) for _ in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=size, ignore_eos=True)
    assert_same(run(with_graphs, prompts, params), run(eager, prompts, params))
    graphs = with_graphs.runner.graphs
    holding = min(bucket for bucket in graphs.buckets if bucket >= 2 * rows)
    assert any(key[0] == holding for key in graphs._captured)


@pytest.mark.gpu
def test_after_retraction(pair):
    """Preempted rows resume in other pages, in graphs that were replayed with the old ones."""
    with_graphs, eager = pair
    rng, size = random.Random(1), eager.config.page_size
    cache, scheduler = with_graphs.core.cache, with_graphs.core.scheduler
    before = scheduler.preemptions
    hostage = occupy(cache, keep=40)
    prompts = [text(rng, 3 * size) for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=7 * size, ignore_eos=True)
    got = run(with_graphs, prompts, params)
    cache.close(hostage)
    assert scheduler.preemptions > before
    assert_same(got, run(eager, prompts, params))


@pytest.mark.gpu
def test_no_length_is_captured_again(pair):
    with_graphs, _ = pair
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for length in (5, 90, 300):
        rng = random.Random(length)
        run(with_graphs, [text(rng, length), text(rng, 7)], params)
        known = dict(with_graphs.runner.graphs._captured)
    run(with_graphs, [text(rng, 200), text(rng, 30)], params)
    assert with_graphs.runner.graphs._captured == known


def prompts(rng, count, longest):
    """Lengths around page borders, shorter than the window, and with many candidate pages."""
    edges = [1, 62, 63, 64, 126, 127, 256, 257, 700]
    lengths = [
        rng.choice(edges) if rng.random() < 0.5 else rng.randrange(1, longest) for _ in range(count)
    ]
    return [{"prompt_token_ids": text(rng, n, 256)} for n in lengths]


def default_model(**options) -> LLM:
    return LLM(device="cuda", max_model_len=8192, kv_cache_memory="512MiB", **options)


def counts(llm: LLM) -> tuple[int, ...]:
    stats = llm.stats()
    return stats.queries, stats.pages_read, stats.pages_held


@pytest.mark.gpu
def test_the_default_model_answers_and_counts_the_same():
    """Pages of 64 slots, and far more candidate pages than are selected."""
    params = [
        SamplingParams(temperature=0, max_tokens=140, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=1, top_p=0.9, max_tokens=140, ignore_eos=True),
        SamplingParams(temperature=0, logit_bias={5: 100.0}, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.01, seed=2, max_tokens=140),
        SamplingParams(temperature=0, max_tokens=140, ignore_eos=True, logprobs=2),
    ]
    found = []
    for eager in (False, True):
        llm = default_model(dtype="float32", max_num_seqs=5, disable_cuda_graph=eager)
        given = prompts(random.Random(5), len(params), 5000)
        results = llm.generate(given, params, use_tqdm=False)
        found.append(([r.outputs[0].token_ids for r in results], counts(llm)))
        llm.shutdown()
    assert found[0] == found[1]
    assert found[0][0][2] == [5] * 40
