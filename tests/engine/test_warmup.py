"""What a server runs before it is ready leaves no trace, and nothing to be compiled later."""

from __future__ import annotations

import random

import pytest
import torch

from cairn.engine.warmup import warm_up
from cairn.types import SamplingParams
from tests.engine.harness import engine, greedy, run

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_lengths_compile_nothing(dtype, monkeypatch):
    runtime = pytest.importorskip("triton").knobs.runtime
    options = {"device": "cuda", "dtype": dtype, "kv_cache_memory": "256MiB", "max_num_seqs": 4}
    built = engine(CASE, max_model_len=4096, **options)
    compiled: list[str] = []
    monkeypatch.setattr(runtime, "jit_cache_hook", lambda **k: compiled.append(k["fn"].name))
    warm_up(built)
    assert compiled, "the hook sees nothing"
    compiled.clear()
    rng = random.Random(7)
    # Kernels that report are compiled where an engine measures its steps.
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for length in rng.sample(range(1, 4000), 50):
        prompt = [rng.randrange(built.spec.vocab_size) for _ in range(length)]
        run(built, [prompt], params, poisoned=False)
        torch.cuda.synchronize()
        assert not compiled, f"a prompt of {length} tokens compiles {compiled}"
