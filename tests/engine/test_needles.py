"""The embedded model finds facts in a long document, through the whole engine.

The document is the standard library's own source; how and where facts hide in it is
`cairn.demo.document`'s business.
"""

from __future__ import annotations

import random

import pytest

from cairn import LLM, SamplingParams
from cairn.demo.document import Fact, build_document, make_facts

QUESTIONS = 2
"""Facts of each of the three kinds per document."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The default model of `LLM()`, with room for the longest document."""
    llm = LLM(kv_cache_memory="1GiB", max_num_seqs=4)
    yield llm
    llm.shutdown()


def ask(llm: LLM, text: str, facts: list[Fact]) -> list[str]:
    """Prefill the document once, then answer every question after it."""
    read = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(text, read, use_tqdm=False)
    params = [SamplingParams(temperature=0, max_tokens=len(fact.answer)) for fact in facts]
    results = llm.generate([text + fact.question for fact in facts], params, use_tqdm=False)
    for result in results:
        assert result.num_cached_tokens > len(text) - 64
    return [result.outputs[0].text for result in results]


def found(llm: LLM, tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    facts = make_facts(QUESTIONS, rng)
    assert {fact.kind for fact in facts} == {"line", "sentence", "chain"}
    document = build_document(tokens, facts, rng)
    assert len(document.text) == tokens
    assert document.text.isascii()
    assert ask(llm, document.text, facts) == [fact.answer for fact in facts]


@pytest.mark.parametrize("tokens", [2500, pytest.param(8192, marks=pytest.mark.slow)])
def test_the_three_kinds_of_question(llm, tokens):
    found(llm, tokens, seed=tokens)


def test_without_the_fact_there_is_no_answer(llm):
    """Answers come from the document, not from the question."""
    rng = random.Random(7)
    (fact, *_) = make_facts(1, rng)
    document = build_document(1500, make_facts(1, rng), rng)
    assert ask(llm, document.text, [fact]) != [fact.answer]


@pytest.mark.slow
def test_at_128k(llm):
    found(llm, 131072, seed=128)
