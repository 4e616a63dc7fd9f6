"""Invariance of every family: random schedules compared with each request alone.

The same tokens give the same logits, however prompts are cut into chunks, with whom they share
steps, how much of them is found in the prefix cache, whether pages are taken back in between, in
which physical pages they lie, and with what is aborted beside them.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.cache.invariants import check
from cairn.cache.paged import Lease
from cairn.engine.build import Built
from cairn.engine.continuation import Continuation
from cairn.engine.planned_step import Limits
from tests.engine import dsv4
from tests.engine.fakes import all_pages_back
from tests.engine.harness import (
    Trace,
    assert_same,
    engine,
    greedy,
    occupy,
    poison,
    run,
    text,
    trace,
)
from tests.support import shows

DATA = Path(__file__).parents[1] / "data" / "goldens"
FAMILIES = {
    "landmarks": DATA / "hils" / "qwen_gqa4_prior_lora_inrange",
    "landmarks and windows": DATA / "hils" / "olmo_mha_interleave4",
    "experts": DATA / "qwen35" / "q3moe_nonorm_sparse2",
    "recurrent": DATA / "qwen35" / "q35_dense_ratio3_tied",
    "recurrent with experts": DATA / "qwen35" / "qnext_3to1",
    "latent, shared selections": DATA / "dsa" / "glm_types_mixed_dense2",
    "latent in 8 bits": DATA / "dsa" / "v32_fp8_scale_ue8m0",
    "compressed": None,
}
"""Model folders; None for random weights."""
OUTPUT = 6


def build(family: str, **options) -> Built:
    """An engine that allocates pages in random order."""
    options |= {"kv_cache_memory": "16MiB", "max_num_seqs": 4}
    folder = FAMILIES[family]
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            built = dsv4.made(Path(name), **options)
    else:
        built = engine(str(folder), **options)
    allocator = built.core.cache.allocator
    pages = allocator.take(allocator.num_free)
    random.Random(4).shuffle(pages)
    allocator.free(pages)
    return built


def prompts_of(rng: random.Random, size: int, vocab: int) -> list[list[int]]:
    """Prompts that share no, some or nearly all tokens with one another."""
    base = text(rng.randrange(1 << 20), 5 * size, vocab)
    found = []
    for number in range(5):
        shared = rng.choice([0, 1, size, rng.randrange(len(base)), len(base) - 1])
        more = rng.choice([1, size - 1, rng.randint(1, 2 * size)])
        found.append(base[:shared] + text(rng.randrange(1 << 20) + number, more, vocab))
    return found


def serve(
    built: Built, rng: random.Random, prompts: list[list[int]], hostage: Lease
) -> list[Trace | None]:
    """Requests that arrive while others run, in steps of random sizes; some are aborted (None).
    Unowned memory is NaN, and the ledger is checked after every step."""
    core, size = built.core, built.config.page_size
    waiting, live, doomed = list(enumerate(prompts)), {}, {}
    while waiting or core.has_work:
        if waiting and (rng.random() < 0.3 or not core.has_work):
            number, prompt = waiting.pop(0)
            live[number] = core.add(f"r{core._arrivals}", prompt, greedy(OUTPUT))
            if rng.random() < 0.2:
                doomed[number] = rng.randint(1, 4)
        core.scheduler.limits = Limits(4, rng.choice([1, 3, size, size + 1, 2 * size, 1000]))
        core.step()
        for number in [n for n in doomed if doomed[n] <= 0 and not live[n].finished]:
            core.abort(live[number].request.id)
        doomed = {number: left - 1 for number, left in doomed.items()}
        poison(built)
        running = [r.lease for r in core.scheduler.running if r.lease is not None]
        check(core.cache, [hostage, *running])
    return [_ended(live[number], built) for number in range(len(prompts))]


def _ended(continuation: Continuation, built: Built) -> Trace | None:
    aborted = continuation.stream.output.finish_reason == "abort"
    return None if aborted else trace(continuation, built.spec.vocab_size)


def expect_each_as_alone(
    built: Built, cold: Built, rng: random.Random, prompts: list[list[int]]
) -> None:
    """Random schedules give the results of each request alone on another engine; all pages are
    freed."""
    alone = [run(cold, [prompt], greedy(OUTPUT), poisoned=False)[0] for prompt in prompts]
    longest = max(len(prompt) for prompt in prompts) + OUTPUT
    # Two of the longest requests fit together: others wait, or are preempted.
    hostage = occupy(built.core.cache, keep=2 * int(built.slots.pages_for(longest)) + 1)
    for _ in range(2):
        for found, wanted in zip(serve(built, rng, prompts, hostage), alone, strict=True):
            if found is not None:
                assert_same(found, wanted)
    built.core.cache.close(hostage)
    assert all_pages_back(built.core)


@shows("hils qwen3_moe qwen3_next qwen3_5", "batching", "chunked prefill", "prefix cache")
@shows("glm_moe_dsa deepseek_v32", "batching", "chunked prefill", "prefix cache")
@shows("deepseek_v4", "batching", "chunked prefill", "prefix cache")
@shows("deepseek_v32", "quantised weights")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_schedule_gives_what_each_request_gives_alone(family: str, seed: int) -> None:
    rng = random.Random(seed)
    built = build(family)
    size, vocab = built.config.page_size, built.spec.vocab_size
    prompts = prompts_of(rng, min(size, 32), vocab)
    cold = build(family, enable_prefix_caching=False)
    expect_each_as_alone(built, cold, rng, prompts)


@pytest.mark.parametrize("family", ["landmarks and windows", "recurrent", "latent in 8 bits"])
def test_uninitialised_memory_changes_no_bit(family: str, monkeypatch) -> None:
    """Memory of uninitialised tensors is NaN, or unchanged."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for filled in (False, True):
            torch.utils.deterministic.fill_uninitialized_memory = filled
            built = build(family)
            prompts = [
                text(seed, length, built.spec.vocab_size) for seed, length in enumerate((5, 90))
            ]
            found.append(run(built, prompts, greedy(4), budgets=[50], poisoned=False))
        assert bool(torch.empty(3).isnan().all()), "memory was not filled"
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*found, strict=True):
        assert first.tokens == second.tokens
        assert np.array_equal(first.logprobs, second.logprobs)


@shows("qwen3_moe qwen3_next qwen3_5 deepseek_v32 glm_moe_dsa deepseek_v4", "overlap")
@pytest.mark.parametrize("family", [name for name in FAMILIES if "landmarks" not in name])
def test_planned_while_a_step_runs(family: str) -> None:
    found = []
    for overlap in (True, False):
        built = build(family)
        built.core.overlap = overlap
        vocab = built.spec.vocab_size
        prompts = [text(seed, length, vocab) for seed, length in enumerate((5, 70, 100))]
        found.append(run(built, prompts, greedy(12), budgets=[50], poisoned=False))
    for got, wanted in zip(*found, strict=True):
        assert_same(got, wanted)
