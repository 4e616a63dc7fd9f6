"""Completions with scripted outputs."""

import asyncio
from types import SimpleNamespace

import pytest

from cairn.engine.messages import Delta
from cairn.server import completions
from cairn.server.completions import CompletionResponseBuilder, Prompt
from cairn.server.protocol.completions import CompletionRequest
from tests.server.fake_api import FakeApi
from tests.server.fake_client import WORDS, position, positions

PATH = "/v1/completions"


def by_index(events):
    texts = {}
    for event in events:
        for choice in event["choices"]:
            texts.setdefault(choice["index"], []).append(choice)
    return texts


def rebuilt(parts):
    """A choice joined from its streamed parts."""
    lists = [part["logprobs"] for part in parts if part["logprobs"]]
    names = lists[0] if lists else ()
    return {
        "text": "".join(part["text"] for part in parts),
        "logprobs": {k: [item for each in lists for item in each[k]] for k in names} or None,
        "finish_reason": parts[-1]["finish_reason"],
        "reads": [read for part in parts if "cairn" in part for read in part["cairn"]["selection"]],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ["one", "two"], "n": 2},
        {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2, "n": 2},
        {"prompt": "größe 🐘", "echo": True, "logprobs": 0, "max_tokens": 1},
        {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": "ab", "echo": True},
        {"max_tokens": 5, "cairn": {"selection": True}},
    ],
)
def test_stream_equals_answer(api, fields):
    answer = api.complete(**fields)
    usage = {"include_usage": True}
    *events, last = api.events(PATH, {"prompt": "hi", "stream_options": usage} | fields)
    parts = by_index(events)
    assert sorted(parts) == [choice["index"] for choice in answer["choices"]]
    for choice in answer["choices"]:
        seen = rebuilt(parts[choice["index"]])
        assert seen["text"] == choice["text"]
        assert seen["logprobs"] == choice["logprobs"]
        assert seen["finish_reason"] == choice["finish_reason"]
        assert seen["reads"] == choice.get("cairn", {"selection": []})["selection"]
    assert last["usage"] == answer["usage"] and last["choices"] == []


def test_default_is_sixteen_tokens(api):
    assert api.complete()["usage"]["completion_tokens"] == 16
    assert api.asked.params.max_tokens == 16


@pytest.mark.parametrize(
    "prompt, ids",
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([[97], [98]], [[97], [98]]),
    ],
)
def test_forms_of_prompts(api, prompt, ids):
    answer = api.complete(prompt, n=2)
    assert [asked.prompt for asked in api.client.submitted] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))


def test_choices_stand_in_the_order_of_prompts(api):
    api.client.answer = lambda prompt, params, i: bytes(prompt) * (3 - i) + b"%d" % i
    answer = api.complete(["aa", "b", "cccc"], n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aaaaaa0", "aaaa1", "bbb0", "bb1", "cccc" * 3 + "0", "cccccccc1"]


def test_echo_scores_the_prompt(api):
    choice = api.complete("ab", max_tokens=1, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "abE"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "E"],
        "token_logprobs": [None, -0.5 * 99, -0.5 * 70],
        "top_logprobs": [None, {"\x00": -0.5, "b": -49.5}, {"\x00": -0.5, "E": -35.0}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_prompts_are_scored_piece_by_piece(api, monkeypatch, size):
    text = "größe 🐘, " * 20
    asked = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 3}
    whole = api.complete(**asked)
    monkeypatch.setattr(completions, "SCORED_AT_ONCE", size)
    assert api.complete(**asked)["choices"] == whole["choices"]


def test_a_long_prompt_lets_others_run(tokenizer):
    ids = [97] * (4 * completions.SCORED_AT_ONCE)
    asked = CompletionRequest(model="m", prompt=ids, echo=True, logprobs=1)
    state = SimpleNamespace(model_name="m", tokenizer=tokenizer)
    shape = CompletionResponseBuilder(state, asked, [Prompt(ids, "a" * len(ids))])
    scores = (positions(ids[1:], 1),)
    delta = Delta("r", 0, "b", (98,), logprobs=(position(98, 1),), prompt_logprobs=scores)

    async def run():
        pushing = asyncio.create_task(shape.push(0, delta))
        turns = 0
        while not pushing.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, pushing.result()

    turns, [part] = asyncio.run(run())
    assert turns > 4
    assert len(part.logprobs.tokens) == len(part.logprobs.text_offset) == len(ids) + 1


def test_nothing_generated(api):
    answer = api.complete("ab", max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert answer["usage"]["completion_tokens"] == 0
    error = api.error(PATH, {"prompt": "a", "max_tokens": 0})
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize("prompt", ["a" * 4096, [97] * 4096], ids=["text", "ids"])
def test_a_full_context_is_scored(api, prompt):
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0}
    choice = api.complete(prompt, **fields)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 4096
    for other in ({"max_tokens": 1}, {"prompt": prompt + prompt[:1]}):
        error = api.error(PATH, {"prompt": prompt, **fields, **other})
        assert error["code"] == "context_length_exceeded", error
        assert "output" not in error["message"] or other == {"max_tokens": 1}


def test_offsets_are_characters_and_parts_show_bytes(api):
    api.client.answer = lambda *_: "🐘!".encode()
    scored = api.complete("ö", echo=True, logprobs=0, max_tokens=9)["choices"][0]["logprobs"]
    assert scored["tokens"] == [
        "bytes:\\xc3",
        "bytes:\\xb6",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x90",
        "bytes:\\x98",
        "!",
    ]
    assert scored["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


def test_echo_without_scores(api):
    choice = api.complete([97, 98], echo=True, max_tokens=2)["choices"][0]
    assert choice["text"] == "abEi" and choice["logprobs"] is None
    assert api.asked.params.prompt_logprobs is None


def test_scores_without_echo(api):
    choice = api.complete("ab", logprobs=3, max_tokens=2)["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 4
    assert api.asked.params.prompt_logprobs is None


def test_scores_wait_for_the_prompt_of_all_choices(api):
    deltas = api.client._deltas

    def late(request_id, prompt, params, index):
        # The second output begins before the first, whose delta has the prompt's log-probabilities.
        yield from deltas(request_id, prompt, params, 1 - index)

    api.client._deltas = late
    answer = api.complete("ab", n=2, echo=True, logprobs=1, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["abEi", "abEi"]
    for choice in answer["choices"]:
        assert choice["logprobs"]["tokens"] == ["a", "b", "E", "i"]


@pytest.mark.parametrize(
    "fields, param, text",
    [
        ({"prompt": []}, "prompt", "1"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", 3]}, "prompt", "mixes"),
        ({"prompt": [256]}, "prompt", "256"),
        ({"prompt": [-1]}, "prompt[0]", "0"),
        ({"prompt": [2**31 - 1], "echo": True}, "prompt", "2147483647"),
        ({"prompt": [2**40]}, "prompt[0]", "2147483647"),
        ({"prompt": ["a"] * 257}, "prompt", "256"),
        ({"prompt": ["a"] * 65}, "prompt", "64"),
        ({"prompt": [1], "add_special_tokens": True}, "add_special_tokens", "text"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "max_tokens"),
        ({"min_tokens": 17}, "min_tokens", "16"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "256"),
    ],
)
def test_refused(api, fields, param, text):
    error = api.error(PATH, {"prompt": "hi"} | fields)
    assert text in error["message"]
    assert error["param"] == param
    assert not api.client.live


def test_without_tokenizer():
    api = FakeApi(None)
    assert "tokenizer" in api.error(PATH, {"prompt": "text"})["message"]
    choice = api.complete([1, 2], echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2", f"token_id:{WORDS[0]}"]


def test_sampling_defaults(api):
    api.state.sampling_defaults = {"temperature": 0.6, "top_p": 0.9}
    api.complete("a", top_p=0.5)
    assert (api.asked.params.temperature, api.asked.params.top_p) == (0.6, 0.5)
    api.chat(temperature=0)
    assert (api.asked.params.temperature, api.asked.params.top_p) == (0, 0.9)


def test_an_empty_suffix_asks_for_nothing(api):
    assert api.complete("a", suffix="")["choices"][0]["text"]
    assert api.error(PATH, {"prompt": "a", "suffix": "b"})["param"] == "suffix"


@pytest.mark.parametrize("best_of", [1, 1.0, None])
def test_the_best_of_one_is_it(api, best_of):
    assert api.complete("a", best_of=best_of)
    assert api.error(PATH, {"prompt": "a", "best_of": True})["param"] == "best_of"


def test_whole_numbers_may_be_written_as_floats(api):
    fields = {"max_tokens": 5.0, "seed": 3.0, "n": 1.0, "top_k": 2e1, "min_tokens": -0.0}
    api.complete("a", **fields, logprobs=1.0, stop_token_ids=[7.0], logit_bias={"3": 1.0})
    params = api.asked.params
    assert (params.max_tokens, params.seed, params.n, params.top_k) == (5, 3, 1, 20)
    assert (params.logprobs, params.stop_token_ids, params.logit_bias) == (1, (7,), {3: 1.0})
    api.complete([104.0, 105.0])
    assert api.asked.prompt == [104, 105]
    api.complete("a", max_tokens=5.0, temperature=0.5, stop="x")
    assert api.asked.params.temperature == 0.5
    for name, value in (("max_tokens", 5.5), ("seed", 1e300), ("max_tokens", "5"), ("n", 0.0)):
        assert api.error(PATH, {"prompt": "a", name: value})["param"] == name
