"""Speculative decoding with the public class: the same outputs, and counters."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from cairn import LLM, SamplingParams
from cairn.bench.session import Subject
from cairn.bench.speculation import CASES, SpeculationPlan, run_speculation
from cairn.types import Grammar
from tests.engine.fakes import FakeDrafter
from tests.llm.conftest import assert_idle

VERSE = "def add(a, b):\n    return a + b\n\n\n"


@pytest.fixture(scope="module")
def guessing(text_folder) -> LLM:
    found = LLM(
        text_folder,
        dtype="float32",
        device="cpu",
        kv_cache_memory="32MiB",
        speculative_config={"method": "ngram", "num_speculative_tokens": 5},
    )
    # Force drafts, which otherwise depend on measured times.
    found.engine.core.scheduler.pace = None
    return found


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


@pytest.mark.parametrize(
    "adjusted",
    [
        {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"presence_penalty": 1.5, "temperature": 0.8, "seed": 3},
        {"grammar": Grammar("regex", r"(    return [a-c] [+*-] [a-c]\n){3,6}")},
        {
            "grammar": Grammar(
                "json_schema", '{"type": "array", "minItems": 9, "items": {"enum": [1, 22]}}'
            )
        },
    ],
    ids=lambda adjusted: next(iter(adjusted)),
)
def test_penalties_and_grammars_count_guesses(llm, guessing, adjusted) -> None:
    """Penalties count the guesses before a position, and grammars follow them."""
    before = guessing.stats()
    params = SamplingParams(**{"temperature": 0, "max_tokens": 60, **adjusted})
    prompts = [VERSE * 3, "[1, 2, 3, 1, 2, 3, 1, 2, 3, "]
    plain = llm.generate(prompts, params)
    drafter = FakeDrafter(1, 0.7, most=5)
    for one in plain:
        drafter.knows(list(one.prompt_token_ids), one.outputs[0].token_ids)
    with patch.object(guessing.engine.core.scheduler, "drafter", drafter):
        found = guessing.generate(prompts, params)
    for one, wanted in zip(found, plain, strict=True):
        assert one.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert one.outputs[0].finish_reason == wanted.outputs[0].finish_reason
    assert guessing.stats().accepted_tokens > before.accepted_tokens + 5
    assert guessing.stats().drafted_tokens > guessing.stats().accepted_tokens


def test_the_benchmark_counts_right_and_wrong_guesses(text_folder) -> None:
    options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "32MiB"}
    plan = SpeculationPlan(Subject(text_folder), 12, (2,), 9, 3, "hsa", options)
    right, drawn, wrong = run_speculation(plan)
    assert [cell.case for cell in (right, drawn, wrong)] == list(CASES)
    assert right.drafted == right.accepted > 0 == wrong.accepted
    assert right.batch == 2 and right.ms > 0 < right.plain_ms and drawn.tokens_per_s > 0
