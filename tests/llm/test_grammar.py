"""Grammars with the LLM class."""

from __future__ import annotations

import json

import pytest

from cairn import BadRequest, Grammar, SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"]}
PERSON = Grammar("json_schema", json.dumps({**SCHEMA, "additionalProperties": False}))


def test_every_continuation_satisfies_the_grammar(llm):
    params = SamplingParams(n=4, seed=1, max_tokens=80, grammar=PERSON)
    free = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    bound, other = llm.generate(["One:", "Two:"], [params, free], use_tqdm=False)
    for output in bound.outputs:
        assert output.finish_reason == "stop"
        assert json.loads(output.text)["a"] in (1, 22, 333)
    (alone,) = llm.generate("Two:", free, use_tqdm=False)
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_stream_satisfies_it(llm):
    params = SamplingParams(max_tokens=30, grammar=Grammar("regex", "(yes|no), [a-z]{4}!"))
    pieces = [piece for piece, _ in llm.stream("Well?", params)]
    assert "".join(pieces).partition(", ")[0] in ("yes", "no")
    assert "".join(pieces)[-1] == "!"


@pytest.mark.parametrize("grammar", [Grammar("regex", "("), Grammar("json_schema", '{"$ref":"#"}')])
def test_a_wrong_grammar_is_refused_before_anything_runs(llm, grammar):
    steps = llm.stats().steps
    wanted = [SamplingParams(max_tokens=3), SamplingParams(grammar=grammar)]
    with pytest.raises(BadRequest, match="cannot be used"):
        llm.generate(["a", "b"], wanted, use_tqdm=False)
    with pytest.raises(BadRequest, match="cannot be used"):
        next(llm.stream("b", wanted[1]))
    assert llm.stats().steps == steps


def test_a_model_without_a_tokenizer_takes_none(token_llm):
    with pytest.raises(BadRequest, match="no tokenizer"):
        token_llm.generate({"prompt_token_ids": [5]}, SamplingParams(grammar=PERSON))
