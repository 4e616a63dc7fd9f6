"""Warm-up leaves no trace in the engine, and no kernel to be compiled later."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cairn.attention.cuts import Front
from cairn.engine.warmup import first_steps, warm_up
from cairn.types import SamplingParams
from tests.engine.fakes import FakeDrafter
from tests.engine.harness import engine, greedy, run, text

CASE = "qwen_gqa4_prior_lora_inrange"


def test_an_engine_answers_as_one_that_was_not_warmed_up():
    prompts = [list(range(5, 5 + length)) for length in (3, 30)]
    cold, warm = engine(CASE), engine(CASE)
    warm_up(warm)
    assert warm.runner.reads.queries == 0
    assert (warm.runner.reads.window, warm.runner.reads.held) == (0, 0)
    assert warm.core.cache.allocator.num_free == cold.core.cache.allocator.num_free
    expected, got = (run(built, prompts, greedy(4)) for built in (cold, warm))
    for one, other in zip(expected, got, strict=True):
        assert one.tokens == other.tokens
        assert (one.logprobs == other.logprobs).all()
        assert other.cached == 0


@pytest.mark.parametrize("options", [{"max_model_len": 2}, {"chunked_prefill_size": 1}])
def test_a_small_engine_is_warmed_up_within_its_limits(options):
    built = engine(CASE, max_num_seqs=1, **options)
    warm_up(built)
    assert len(run(built, [[5]], greedy(1))[0].tokens) == 1


def test_lengths_behind_a_past_are_steps_of_one_row():
    built = engine(CASE)
    first = replace(first_steps(built), most=161)
    [steps] = first.behind(70, [5, 32, 40])
    works = [plan.work for plan in steps.prefills]
    ends = [(work.first, work.first + work.num_tokens, work.sample) for (work,) in works]
    # The context in steps of at most the longest length, then each length.
    assert ends == [
        *((0, 40, False), (40, 70, False), (70, 75, False), (75, 107, False), (107, 147, True)),
    ]
    begin, *others = steps.prefills
    assert len(begin.opened) == len(begin.grants) == 1
    assert len(begin.grants[0].pages) == int(built.slots.pages_for(148))
    assert not any(plan.opened or plan.grants for plan in others)
    assert steps.decode.decode.first.tolist() == [147]
    # Lengths that do not fit are omitted, and so is the context if it does not fit.
    [fewer] = replace(first, most=147).behind(70, [5, 32, 40])
    assert fewer.decode.decode.first.tolist() == [107]
    assert replace(first, most=75).behind(70, [5, 32]) == []


def test_every_front_of_a_row_has_steps_behind_it():
    """A row that ends within the second step has later steps of the first row only."""
    built = engine(CASE)
    assert len(built.runner.front_slots) == 1
    built.runner.backends.cutter.limits = (Front(20, 5), Front(60, 15))
    fronts = [int(built.slots.tokens_in(slots)) for slots in (20, 60)]
    for most, behind in ((140, fronts), (fronts[1] + 3, fronts[:1]), (fronts[0], [])):
        found = replace(first_steps(built), most=most + 1).behind_fronts([3, 9])
        assert len(found) == len(behind)
        for steps, past in zip(found, behind, strict=True):
            assert past + 1 in [plan.work[0].first for plan in steps.prefills]


def test_a_pool_of_fewer_pages_gives_some_twice():
    first = replace(first_steps(engine(CASE)), pages=3, window_pages=2)
    grant = first.granted(1, range(5))
    assert (grant.pages, grant.window) == ((0, 1, 2, 0, 1), (0, 1, 0, 1, 0))
    assert replace(first, window_pages=0).granted(1, (0, 1)).window == ()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_lengths_compile_nothing(dtype, monkeypatch, tmp_path):
    runtime = pytest.importorskip("triton").knobs.runtime
    # Kernels that are already on disk are not loaded in advance.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"device": "cuda", "dtype": dtype, "kv_cache_memory": "256MiB", "max_num_seqs": 4}
    built = engine(CASE, max_model_len=4096, **options)
    compiled: list[str] = []
    monkeypatch.setattr(runtime, "jit_cache_hook", lambda **k: compiled.append(k["fn"].name))
    warm_up(built)
    assert compiled, "the hook sees nothing"
    compiled.clear()
    rng = random.Random(7)
    # Kernels of reports are compiled when an engine measures its steps.
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for length in rng.sample(range(1, 4000), 50):
        prompt = [rng.randrange(built.spec.vocab_size) for _ in range(length)]
        run(built, [prompt], params, poisoned=False)
        torch.cuda.synchronize()
        assert not compiled, f"a prompt of {length} tokens compiles {compiled}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_guesses_compile_nothing(dtype, monkeypatch, tmp_path):
    """One or several rows, with up to seven guesses each, some wrong, across the ends of pages."""
    runtime = pytest.importorskip("triton").knobs.runtime
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"device": "cuda", "dtype": dtype, "kv_cache_memory": "256MiB", "max_num_seqs": 4}
    guessing = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 7}
    built = engine(CASE, max_model_len=1024, **options, **guessing)
    compiled: list[str] = []
    monkeypatch.setattr(runtime, "jit_cache_hook", lambda **k: compiled.append(k["fn"].name))
    warm_up(built)
    assert compiled, "the hook sees nothing"
    compiled.clear()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    scheduler = built.core.scheduler
    scheduler.pace = None
    for rows in (1, 2, 3, 4):
        prompts = [text(n, 9 + 40 * n, built.spec.vocab_size) for n in range(rows)]
        scheduler.drafter = None
        plain = run(built, prompts, [params] * rows, poisoned=False)
        scheduler.drafter = drafter = FakeDrafter(rows, 0.9, most=7)
        for prompt, output in zip(prompts, plain, strict=True):
            drafter.knows(prompt, list(output.tokens))
        run(built, prompts, [params] * rows, poisoned=False)
        torch.cuda.synchronize()
        assert not compiled, f"{rows} rows with guesses compile {compiled}"
    assert scheduler.drafts.accepted > 50
