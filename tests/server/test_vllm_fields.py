"""vLLM's additional request fields."""

from __future__ import annotations

import pytest

from tests.server.fake_api import chat_body
from tests.server.fake_client import WORDS
from tests.server.test_chat import PATH
from tests.server.test_tool_parser import takes

COMPLETE = "/v1/completions"


@pytest.mark.parametrize(
    "fields, good, bad",
    [
        ({"guided_json": {"const": 5}}, "5", "6"),
        ({"guided_json": '{"const": 5}'}, "5", "6"),
        ({"guided_regex": "a|b"}, "a", "c"),
        ({"guided_choice": ['say "a"', "b\n"]}, 'say "a"', "b"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy", "x"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5", "6"),
        ({"structured_outputs": {"choice": ["é"]}}, "é", "e"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"bad_words": ["b.d", "worse/"]}, "a bad word, worse", "a b.d word"),
        ({"bad_words": ["b.d", "worse/"]}, "", "so\nworse/ than"),
    ],
)
def test_guided_output_fields_become_grammars(api, compiler, fields, good, bad):
    api.chat(**fields)
    grammar = api.asked.params.grammar
    assert takes(compiler, grammar, good) and not takes(compiler, grammar, bad)
    api.complete(**fields)
    assert api.asked.params.grammar == grammar


def test_nothing_asked_for_is_no_grammar(api):
    for fields in ({"structured_outputs": {}}, {"bad_words": []}, {"guided_json": None}):
        api.chat(**fields)
        assert api.asked.params.grammar is None


def test_token_ids(api):
    answer = api.chat(return_token_ids=True, n=2)
    assert answer["prompt_token_ids"] == api.asked.prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [list(WORDS)] * 2
    events = api.events(PATH, chat_body(return_token_ids=True))
    assert events[0]["prompt_token_ids"] == api.asked.prompt
    assert not any("prompt_token_ids" in event for event in events[1:])
    ids = [i for e in events for choice in e["choices"] for i in choice.get("token_ids", ())]
    assert ids == list(WORDS)
    (choice,) = api.complete([72, 105], return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([72, 105], list(WORDS)[:16])
    parts = [
        e["choices"][0] for e in api.events(COMPLETE, {"prompt": "hi", "return_token_ids": True})
    ]
    assert [i for part in parts for i in part["token_ids"]] == list(WORDS)[:16]
    assert "prompt_token_ids" in parts[0] and "prompt_token_ids" not in parts[1]
    assert "token_ids" not in api.complete()["choices"][0]


def test_scores_of_a_prompt(api):
    answer = api.chat(prompt_logprobs=1)
    scores, prompt = answer["prompt_logprobs"], api.asked.prompt
    assert len(scores) == len(prompt) and scores[0] is None
    for token, score in zip(prompt[1:], scores[1:], strict=True):
        assert set(score) == {"0", str(token)}
        assert score[str(token)] == {
            "logprob": -0.5 * (token + 1),
            "rank": token + 1,
            "decoded_token": chr(token),
        }
    choices = api.complete(["ab", "c"], prompt_logprobs=0, n=2)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2, 1, 1]
    echoed = api.complete("ab", echo=True, logprobs=2, prompt_logprobs=0)["choices"][0]
    assert len(echoed["prompt_logprobs"][1]) == 1 and len(echoed["logprobs"]["tokens"]) == 18
    assert api.error(PATH, chat_body(prompt_logprobs=21))["param"] == "prompt_logprobs"


def test_names_of_tokens_by_id(api):
    fields = {"return_tokens_as_token_ids": True}
    (entry, *_) = api.chat(logprobs=True, **fields)["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "token_id:69" and entry["bytes"] == [69]
    lists = api.complete("a", logprobs=1, max_tokens=1, **fields)["choices"][0]["logprobs"]
    assert lists["tokens"] == ["token_id:69"]


@pytest.mark.parametrize("prompt", ["abcdef", list(b"abcdef")])
def test_a_truncated_prompt(api, prompt):
    api.complete(prompt, truncate_prompt_tokens=2, echo=True)
    assert api.asked.prompt == list(b"ef")
    api.complete("x" * 5000, truncate_prompt_tokens=-1)
    assert len(api.asked.prompt) == 4095
    assert (
        api.complete(prompt, truncate_prompt_tokens=3, echo=True)["choices"][0]["text"][:4]
        == "defE"
    )
    api.chat("x" * 5000, truncate_prompt_tokens=20)
    assert bytes(api.asked.prompt).endswith(b"xx\nassistant:") and len(api.asked.prompt) == 20


def test_documents_reach_a_template_that_reads_them(tool_api, api):
    tool_api.chat(documents=[{"title": "A"}])
    assert b"[{'title': 'A'}]" in bytes(tool_api.asked.prompt)
    assert "template" in api.error(PATH, chat_body(documents=[{"title": "A"}]))["message"]


def test_bad_schemas_name_their_field(api):
    for fields, param in (
        ({"guided_json": '{"bomb"'}, "guided_json"),
        ({"structured_outputs": {"regex": "bomb"}}, "structured_outputs.regex"),
        ({"bad_words": ["bomb"]}, "bad_words"),
    ):
        assert api.error(PATH, chat_body(**fields))["param"] == param
    assert not api.client.submitted
