"""OpenAI's Python client with a real server on the embedded model."""

import json
import re

import openai
import pytest
from pydantic import BaseModel

CHAT = [{"role": "user", "content": "Where is the key?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(client, messages=CHAT, **fields):
    given = {"max_tokens": 12, "seed": 3} | fields
    return client.chat.completions.create(model="tiny", messages=messages, **given)


def complete(client, prompt="The key", **fields):
    given = {"max_tokens": 12, "seed": 3} | fields
    return client.completions.create(model="tiny", prompt=prompt, **given)


def followed(stream):
    """Per choice: text, calls, (token, logprob) pairs and the finish reason of a stream; and its
    usage."""
    choices, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            seen = choices.setdefault(
                choice.index, {"text": "", "calls": [], "tokens": [], "numbers": [], "end": None}
            )
            seen["text"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.index == len(seen["calls"]):
                    seen["calls"].append(["", ""])
                seen["calls"][piece.index][0] += piece.function.name or ""
                seen["calls"][piece.index][1] += piece.function.arguments or ""
            for entry in choice.logprobs.content if choice.logprobs else ():
                seen["tokens"].append(entry.token)
                seen["numbers"].append(entry.logprob)
            seen["end"] = choice.finish_reason or seen["end"]
    return choices, usage


def given(answer):
    """The same of a whole response."""
    choices = {}
    for choice in answer.choices:
        entries = choice.logprobs.content if choice.logprobs else ()
        calls = choice.message.tool_calls or ()
        choices[choice.index] = {
            "text": choice.message.content or "",
            "calls": [[call.function.name, call.function.arguments] for call in calls],
            "tokens": [entry.token for entry in entries],
            "numbers": [entry.logprob for entry in entries],
            "end": choice.finish_reason,
        }
    return choices, answer.usage


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        {"n": 3, "temperature": 1.0, "max_tokens": 8, "logprobs": True},
        {"tools": [CLOCK], "tool_choice": "required", "max_tokens": 100},
        {"response_format": {"type": "json_object"}, "max_tokens": 20},
        {"stop": ["e", "t"], "max_tokens": 30},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"101": -100}},
        {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}, "top_p": 0.9},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_stream_equals_answer(client, fields):
    # The first of two equal requests fills the prefix cache, whose hits are part of the usage.
    chat(client, **fields)
    choices, usage = given(chat(client, **fields))
    streamed, told = followed(
        chat(client, stream=True, stream_options={"include_usage": True}, **fields)
    )
    assert told == usage
    assert streamed.keys() == choices.keys()
    for index, choice in choices.items():
        assert streamed[index].pop("numbers") == pytest.approx(choice.pop("numbers"), abs=1e-4)
        assert streamed[index] == choice


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == 8192
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_length_and_usage(client):
    answer = chat(client, max_completion_tokens=7, max_tokens=openai.omit)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_cached_tokens(client):
    prompt = "A long prompt that fills pages. " * 20
    complete(client, prompt)
    details = complete(client, prompt).usage.prompt_tokens_details
    assert details.cached_tokens >= 500


def test_seed_repeats(client):
    texts = {complete(client, temperature=1.0, max_tokens=16, seed=5).choices[0].text for _ in "ab"}
    assert len(texts) == 1
    other = complete(client, temperature=1.0, max_tokens=16, seed=6).choices[0].text
    assert other not in texts


def test_continuations_differ(client):
    answer = complete(client, n=4, temperature=1.0, max_tokens=24)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1


def test_greedy_equals_top_1(client):
    greedy = complete(client, temperature=0).choices[0].text
    assert complete(client, extra_body={"top_k": 1}).choices[0].text == greedy
    assert complete(client, extra_body={"min_p": 1.0}).choices[0].text == greedy
    assert complete(client, top_p=1e-6).choices[0].text == greedy


def test_stop_is_cut(client):
    text = complete(client, temperature=0, max_tokens=30).choices[0].text
    stop = text[8:11]
    choice = complete(client, temperature=0, max_tokens=30, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason == stop
    assert choice.text == text[: text.index(stop)]


def test_logit_bias(client):
    answer = complete(client, logit_bias={str(ord("Z")): 100}, temperature=0, max_tokens=5)
    assert answer.choices[0].text == "ZZZZZ"


def test_logprobs(client):
    entries = chat(client, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert len(entries) == 12
    for entry in entries:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 4 and tops == sorted(tops, reverse=True)
        assert entry.logprob <= max(tops) + 1e-6


def test_json_object(client):
    answer = chat(
        client,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=400,
        logit_bias={str(ord("}")): 20},
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


class Point(BaseModel):
    x: int
    up: bool


def test_json_schema_by_pydantic(client):
    # Few digits: a model of this size would continue to count.
    parsed = client.chat.completions.parse(
        model="tiny",
        messages=CHAT,
        response_format=Point,
        max_tokens=200,
        temperature=0,
        logit_bias={str(ord(sign)): 30 for sign in ",}"},
    )
    assert isinstance(parsed.choices[0].message.parsed, Point)


def test_regex_and_ebnf(client):
    answer = complete(client, extra_body={"regex": "[0-9]{3}-[a-c]{2}"}, max_tokens=40)
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"
    grammar = 'start: ("yes" | "no") "!"'
    text = chat(client, extra_body={"ebnf": grammar}).choices[0].message.content
    assert text in ("yes!", "no!")


def test_wrong_grammars(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"regex": "(["})
    assert caught.value.param == "regex"
    schema = {"name": "x", "schema": {"type": "nothing"}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format={"type": "json_schema", "json_schema": schema})
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_tool_call_and_its_result(client, choice):
    bias = {str(ord(sign)): 20 for sign in '"}w'}
    answer = chat(
        client,
        tools=[WEATHER, CLOCK],
        tool_choice=choice,
        max_tokens=200,
        temperature=0,
        logit_bias=bias,
    )
    (made,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert made.function.name == "weather"
    assert 1 <= json.loads(made.function.arguments)["days"] <= 9
    told = {"role": "tool", "tool_call_id": made.id, "content": "Rain."}
    after = chat(client, [*CHAT, answer.choices[0].message, told], tools=[WEATHER, CLOCK])
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_stream_helper_of_the_client(client):
    given = {"model": "tiny", "messages": CHAT, "seed": 3, "extra_body": {"regex": "[a-f]{5}"}}
    with client.chat.completions.stream(**given) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    whole = client.chat.completions.parse(**given).choices[0]
    assert final.choices[0].message == whole.message
    assert final.choices[0].finish_reason == whole.finish_reason == "stop"


def test_selection(client):
    prompt = "Some text that is long enough for a page or two to be outside the window. " * 20
    answer = complete(client, prompt, max_tokens=3, extra_body={"cairn": {"selection": True}})
    reads = answer.choices[0].cairn["selection"]
    assert len(reads) == answer.usage.completion_tokens
    for token in reads:
        for layer in token:
            assert len(layer["pages"]) == len(layer["weights"]) <= 64
            assert sum(layer["weights"]) + layer["window"] <= 1.01
    assert any(layer["pages"] for token in reads for layer in token)


def test_completion_stream(client):
    whole = complete(client, echo=True, logprobs=2)
    parts = [
        c for chunk in complete(client, echo=True, logprobs=2, stream=True) for c in chunk.choices
    ]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset
    assert parts[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "call, kind, param",
    [
        (lambda c: chat(c, temperature=9), openai.BadRequestError, "temperature"),
        (lambda c: chat(c, extra_body={"tempratur": 1}), openai.BadRequestError, "tempratur"),
        (lambda c: complete(c, "x" * 9000), openai.BadRequestError, "prompt"),
        (lambda c: complete(c, best_of=2), openai.BadRequestError, "best_of"),
        (
            lambda c: chat(c, extra_body={"guided_json": {}, "regex": "a"}),
            openai.BadRequestError,
            "guided_json",
        ),
        (
            lambda c: c.chat.completions.create(model="gpt-4", messages=CHAT),
            openai.NotFoundError,
            "model",
        ),
    ],
)
def test_errors(client, call, kind, param):
    with pytest.raises(kind) as caught:
        call(client)
    assert caught.value.param == param
    assert caught.value.type
