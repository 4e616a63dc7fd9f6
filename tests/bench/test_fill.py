"""Pools filled with random pages instead of a prefill."""

from __future__ import annotations

import pytest

from cairn import LLM, SamplingParams
from cairn.bench.fill import fill_pages
from cairn.cache.invariants import check
from tests.engine.harness import GOLDENS


@pytest.mark.parametrize("case", ["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"])
def test_filled_prompts_are_cache_hits(case):
    llm = LLM(
        str(GOLDENS / case), device="cpu", dtype="float32", kv_cache_memory="5MiB",
        max_num_seqs=2, chunked_prefill_size=64,
    )  # fmt: skip
    core, size = llm.engine.core, llm.engine_config.page_size
    prompts = [{"prompt_token_ids": [n] * 1000} for n in (1, 2)]
    fill_pages(llm, prompts, left=100)
    check(core.cache, [])
    for result in llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True)):
        assert result.num_cached_tokens == 900 // (size - 1) * (size - 1)
        assert len(result.outputs[0].token_ids) == 3
    check(core.cache, [])
    llm.shutdown()


def test_filled_prompts_of_recurrent_layers_have_a_state():
    llm = LLM(
        str(GOLDENS.parent / "qwen35" / "q35_dense_ratio3_tied"), device="cpu", dtype="float32",
        kv_cache_memory="5MiB", max_num_seqs=2, limit_mm_per_prompt={"image": 0, "video": 0},
    )  # fmt: skip
    core, size = llm.engine.core, llm.engine_config.page_size
    prompts = [{"prompt_token_ids": [n] * (3 * size + 5)} for n in (1, 2)]
    fill_pages(llm, prompts, left=4)
    check(core.cache, [])
    for result in llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True)):
        assert result.num_cached_tokens == 3 * size
    llm.shutdown()
