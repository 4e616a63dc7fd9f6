"""Guessed tokens behind the public class: answers as without, and counted."""

from __future__ import annotations

import pytest

from cairn import LLM, SamplingParams
from tests.llm.conftest import assert_idle

VERSE = "def add(a, b):\n    return a + b\n\n\n"


@pytest.fixture(scope="module")
def guessing(text_folder) -> LLM:
    return LLM(
        text_folder,
        dtype="float32",
        device="cpu",
        kv_cache_memory="32MiB",
        speculative_config={"method": "ngram", "num_speculative_tokens": 5},
    )


def test_answers_are_those_without_guesses(llm, guessing) -> None:
    before = llm.stats()
    prompts = [VERSE * 4 + "def add(", "import os\nimport sys\nimport "]
    text = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text
    for params in (
        SamplingParams(temperature=0, max_tokens=40, stop=[text[10:13]]),
        SamplingParams(temperature=0.6, seed=1, max_tokens=60, logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, logit_bias={10: -100}, min_tokens=20),
    ):
        for found, wanted in zip(
            guessing.generate(prompts, params), llm.generate(prompts, params), strict=True
        ):
            (a,), (b,) = found.outputs, wanted.outputs
            assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
            assert a.stop_reason == b.stop_reason
    stats = guessing.stats()
    assert stats.accepted_tokens > 20
    assert stats.draft_runs <= stats.accepted_tokens + stats.draft_runs < stats.generated_tokens
    assert stats.steps < llm.stats().steps - before.steps
    assert_idle(guessing)


def test_penalties_and_grammars_run_without_guesses(llm, guessing) -> None:
    before = guessing.stats()
    params = SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.5)
    (found,), (wanted,) = (one.generate(VERSE * 3, params) for one in (guessing, llm))
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    after = guessing.stats()
    assert after.drafted_tokens == before.drafted_tokens
    assert after.undrafted_requests == before.undrafted_requests + 1
